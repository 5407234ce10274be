"""The scheduler as the plugin sees it: what is alive in it, how full it is, how to abort and to wake it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import zmq
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput

from tokenflow_engine.control.wakeup import Wakeup
from tokenflow_engine.protocol import EngineStats
from tokenflow_engine.sglang.eligible import why_engine_is_fixed, why_request_is_fixed
from tokenflow_engine.sglang.executor import Executor
from tokenflow_engine.sglang.rows import free_tokens, unshared_prefix
from tokenflow_engine.sglang.table import Device

__all__ = ["SchedulerView", "generate_requests"]

_RATE_WINDOW_S = 1.0


class SchedulerView:
    """Used on the scheduler's thread only."""

    def __init__(self, scheduler: Any, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._progress: deque[tuple[float, int]] = deque()

    @property
    def why_fixed(self) -> str | None:
        """Why nothing in this engine can be preempted; None where it can. May change while it idles."""
        return why_engine_is_fixed(self._scheduler)

    def held_rids(self) -> set[str]:
        """Every request the engine holds anywhere, finished but still in a batch included."""
        deferred = self._scheduler._deferred_input_requests
        unseen = {req.rid for entry in deferred for req in generate_requests(entry)}
        return {req.rid for req in self._all()} | unseen

    @property
    def is_paused(self) -> bool:
        """Whether the engine schedules nothing for now (a weight update, for example)."""
        return bool(self._scheduler._engine_paused)

    def device(self, *, host_free: int) -> Device:
        """Its memory at this moment."""
        scheduler = self._scheduler
        return Device(
            kv_tokens=scheduler.max_total_num_tokens,
            kv_free=free_tokens(scheduler),
            kv_freeing=self._executor.freeing_tokens(),
            max_running=scheduler.max_running_requests,
            max_resident=scheduler.req_to_token_pool.size,
            page_tokens=scheduler.page_size,
            host_free=host_free,
            mixed=scheduler.is_mixed_chunk,
        )

    def may_park(self, req: Any) -> bool:
        """Whether this request can be preempted at all."""
        return self.why_fixed is None and why_request_is_fixed(req) is None

    def shared_tokens(self, req: Any) -> int:
        """Of its KV on the device, tokens that would not be free if it left: others use them too.

        Asks the prefix cache, so it takes a few microseconds.
        """
        protected = int(req.kv.cache_protected_len)
        if self._scheduler.tp_size > 1:  # the other ranks' caches must see the same as this one's
            return protected
        return protected - unshared_prefix(self._scheduler, req)

    def waiting_rids(self) -> set[str]:
        """Requests in the waiting queue."""
        return {req.rid for req in self._scheduler.waiting_queue}

    def abort(self, rid: str) -> None:
        """Abort exactly this request; it is gone once `held_rids` does not have it."""
        namesakes = [req for req in self._all() if req.rid != rid and req.rid.startswith(rid)]
        for req in namesakes:  # the engine aborts by prefix; what is not meant must not match
            req.rid = "\0" + req.rid
        try:
            self._scheduler.abort_request(AbortReq(rid=rid))
        finally:
            for req in namesakes:
                req.rid = req.rid[1:]

    def wake_for(self, bell: Wakeup) -> None:
        """Have an idle scheduler wake up when this rings."""
        if self._scheduler.idle_sleeper is not None:
            self._scheduler.idle_sleeper.poller.register(bell.fileno(), zmq.POLLIN)

    def stop_waking_for(self, bell: Wakeup) -> None:
        """Undo `wake_for`; must come before the bell is closed."""
        if self._scheduler.idle_sleeper is not None:
            self._scheduler.idle_sleeper.poller.unregister(bell.fileno())

    def stats(self, *, generated_total: int, now: float) -> EngineStats:
        """The engine as a whole at this moment; `now` is monotonic seconds."""
        scheduler = self._scheduler
        return EngineStats(
            at=time.time(),
            running=len({req.rid for req in self._running() if not req.finished()} - self._held()),
            waiting=len(scheduler.waiting_queue) + len(scheduler.grammar_manager.grammar_queue),
            parked=0,
            kv_used_tokens=int(scheduler.pool_stats_observer.get_pool_stats().full_num_used),
            kv_tokens=scheduler.max_total_num_tokens,
            tokens_per_s=self._tokens_per_s(generated_total, now),
            generated_total=generated_total,
            fixed={} if self.why_fixed is None else {self.why_fixed: 1},
        )

    def _held(self) -> set[str]:
        return {req.rid for req in self._executor.held()}

    def _running(self) -> Iterator[Any]:
        scheduler = self._scheduler
        for batch in (scheduler.running_batch, scheduler.last_batch):
            if batch is not None:
                yield from batch.reqs
        for batch, _ in scheduler.result_queue:
            yield from batch.reqs
        for req in (scheduler.chunked_req, scheduler._pending_chunked_abort_req):
            if req is not None:
                yield req

    def _all(self) -> set[Any]:
        queued = [*self._scheduler.waiting_queue, *self._scheduler.grammar_manager.grammar_queue]
        return {*self._running(), *queued, *self._executor.held()}

    def _tokens_per_s(self, generated_total: int, now: float) -> float:
        self._progress.append((now, generated_total))
        while len(self._progress) > 2 and now - self._progress[1][0] >= _RATE_WINDOW_S:
            self._progress.popleft()
        then, before = self._progress[0]
        return (generated_total - before) / max(now - then, _RATE_WINDOW_S)


def generate_requests(entry: Any) -> list[TokenizedGenerateReqInput]:
    """The generation requests in one thing that the scheduler received: none, itself, or a batch."""
    batch = getattr(entry, "batch", [entry])
    return [req for req in batch if isinstance(req, TokenizedGenerateReqInput)]
