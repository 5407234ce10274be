"""One prefill pass as a plan wants it: who may start, in which order, and how long the pass may be.

SGLang's pass takes requests from the head of its queue until one does not fit. For the time of one pass the
queue holds only whom the plan admits, in its order; and no memory is kept back for tokens that the running
streams have yet to generate, because those can be parked.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from sglang.srt.managers import schedule_policy

__all__ = ["Admission"]

_GROWTH_TOKENS = 8
"""Kept free for each stream, in place of what it may still generate."""


class Admission:
    """Entered around one prefill pass. `is_open` while it lasts: the queue has its order already."""

    def __init__(self, scheduler: Any) -> None:
        self.is_open = False
        self._scheduler = scheduler
        self._queue: list[Any] = []
        self._admitted: list[Any] = []
        self._before: tuple[int, float, int | None] = (0, 0.0, None)

    def open(self, admit: list[str], prefill_tokens: int | None, batch: Any) -> None:
        """Narrow the pass: these in this order, and no longer than `prefill_tokens`."""
        scheduler = self._scheduler
        self._queue = scheduler.waiting_queue
        self._admitted = _chosen(self._queue, admit)
        tracker = scheduler.new_token_ratio_tracker
        self._before = (
            schedule_policy.CLIP_MAX_NEW_TOKENS,
            tracker.current,
            scheduler.chunked_prefill_size,
        )
        self.is_open = True
        scheduler.waiting_queue = list(self._admitted)
        schedule_policy.CLIP_MAX_NEW_TOKENS, tracker.current = _GROWTH_TOKENS, 1.0
        if scheduler.chunked_prefill_size and prefill_tokens is not None:
            pages = max(1, prefill_tokens // scheduler.page_size)
            limit = min(scheduler.chunked_prefill_size, pages * scheduler.page_size)
            scheduler.chunked_prefill_size = limit
        if self._admitted:
            batch.batch_is_full = False  # it was full for another queue

    def shut(self, batch: Any) -> None:
        """Let nobody in: streams that were taken off the device come first."""
        self.open([], None, batch)

    def close(self) -> None:
        """Undo `open`: who has not been taken is back in the queue, where it was."""
        if not self.is_open:
            return
        self.is_open = False
        scheduler = self._scheduler
        schedule_policy.CLIP_MAX_NEW_TOKENS, scheduler.new_token_ratio_tracker.current, size = self._before
        scheduler.chunked_prefill_size = size
        left = scheduler.waiting_queue
        known = set(self._queue)
        taken = set(self._admitted).difference(left)
        fresh = [req for req in left if req not in known] if left else []
        if taken or fresh:
            scheduler.waiting_queue = [req for req in self._queue if req not in taken] + fresh
        else:
            scheduler.waiting_queue = self._queue
        self._queue, self._admitted = [], []

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chosen(queue: list[Any], rids: list[str]) -> list[Any]:
    if not queue or not rids:
        return []
    waiting = {req.rid: req for req in queue}
    return [waiting[rid] for rid in dict.fromkeys(rids) if rid in waiting]
