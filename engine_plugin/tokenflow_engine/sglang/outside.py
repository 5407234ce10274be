"""Started streams that are out of the batch: why they left, and whose readers ran dry meanwhile.

On the rank that plans. Nothing is done per step: when a stream leaves, the moment at which its reader will
have read everything is known, and nobody looks at it before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from heapq import heappop, heappush

from tokenflow_engine.control.streams import ReaderView

__all__ = ["Outside"]

_DRY_TOKENS = 1e-3
_PAUSE_LOOK_S = 0.25
"""How often a paused reader is looked at, who may read on at any time."""
_LONGEST_S = 60.0
"""Until the next look at anybody."""


class Outside:
    """Totals since the start, by the reason for which a stream is outside. Times are monotonic seconds."""

    def __init__(
        self, reader: Callable[[str, float], ReaderView], reason: Callable[[str], str | None]
    ) -> None:
        self.departures: Counter[str] = Counter()
        self.stalls: Counter[str] = Counter()
        self.stall_s: defaultdict[str, float] = defaultdict(float)
        self._reader = reader
        self._reason = reason
        self._dry_at: dict[str, float] = {}
        """When the reader of each stream outside has read everything, by what was known at the last look."""
        self._looks: list[tuple[float, str]] = []
        self._waited_to: dict[str, float] = {}
        """Whose reader waits, and up to when that has been counted."""

    def left(self, rid: str, now: float) -> None:
        """Out of the batch, or further out."""
        if rid in self._dry_at:
            return
        self._dry_at[rid] = now
        self.departures[self._why(rid)] += 1
        self._look_at(rid, now)

    def back(self, rid: str, now: float) -> None:
        """In the batch again, or ended."""
        if rid in self._dry_at:
            self._look_at(rid, now)
            del self._dry_at[rid]
            self._waited_to.pop(rid, None)

    def reconcile(self, live: Collection[str]) -> None:
        """Forget what the engine no longer holds."""
        for rid in [rid for rid in self._dry_at if rid not in live]:
            del self._dry_at[rid]
            self._waited_to.pop(rid, None)

    def look(self, now: float) -> None:
        """Count what has become of those whose reader may have run dry by now."""
        while self._looks and self._looks[0][0] <= now:
            at, rid = heappop(self._looks)
            if self._dry_at.get(rid) == at and rid not in self._waited_to:
                self._look_at(rid, now)
        for rid in list(self._waited_to):
            self._look_at(rid, now)

    def _look_at(self, rid: str, now: float) -> None:
        reader = self._reader(rid, now)
        if reader.machine:
            return
        if reader.paused or reader.buffered > _DRY_TOKENS:
            self._waited_to.pop(rid, None)
            left_s = _PAUSE_LOOK_S if reader.paused else reader.buffered / max(reader.rate, 1e-6)
            left_s = min(left_s, _LONGEST_S)
            self._dry_at[rid] = now + left_s
            heappush(self._looks, (now + left_s, rid))
            return
        why = self._why(rid)
        if rid not in self._waited_to:
            self.stalls[why] += 1
            self._waited_to[rid] = min(self._dry_at[rid], now)
        self.stall_s[why] += now - self._waited_to[rid]
        self._waited_to[rid] = now

    def _why(self, rid: str) -> str:
        return self._reason(rid) or "none"
