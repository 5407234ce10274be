"""How soon an engine would begin with one more stream, by what its plugin tells."""

from __future__ import annotations

import math
from collections import deque

from tokenflow_engine.protocol import EngineStats

__all__ = ["EngineLoad"]

_UNSEEN_S = 0.1
"""What was sent less than this before the engine's figures may not be in them."""
_LOST_S = 1.0
"""What was sent more than this ago is not waited for: the engine may have refused it."""
_SMOOTHING_S = 3.0
"""Of the rate at which streams begin."""


class EngineLoad:
    """Of one engine that is linked. Times are of one monotonic clock."""

    __slots__ = ("_begun", "_rate", "_seen_at", "_sent", "_stats")

    def __init__(self) -> None:
        self._sent: deque[float] = deque()
        self._stats: EngineStats | None = None
        self._seen_at = 0.0
        self._begun = 0
        self._rate: float | None = None

    def note_stats(self, stats: EngineStats, now: float) -> None:
        """New figures of the engine."""
        before, elapsed_s = self._stats, now - self._seen_at
        begun = stats.started_total - self._begun
        self._stats, self._seen_at, self._begun = stats, now, stats.started_total
        while self._sent and now - self._sent[0] > _UNSEEN_S:
            self._sent.popleft()
        if before is None or elapsed_s <= 0 or begun < 0:
            return
        rate = begun / elapsed_s
        if self._rate is None or not (before.waiting and stats.waiting):
            self._rate = max(rate, self._rate or 0.0)  # nobody waited: it is at least so fast
        else:
            self._rate += (1 - math.exp(-elapsed_s / _SMOOTHING_S)) * (rate - self._rate)

    def forget(self) -> None:
        """The link is down: nothing is known."""
        self._stats, self._rate = None, None

    def sent(self, now: float) -> None:
        """A stream was sent there."""
        self._forget_sent(now)
        self._sent.append(now)

    @property
    def unseen(self) -> int:
        """Streams sent that the engine's figures may not have."""
        return len(self._sent)

    def _forget_sent(self, now: float) -> None:
        while self._sent and now - self._sent[0] > _LOST_S:
            self._sent.popleft()

    def ahead(self, now: float, *, places: int, tokens: int, behind: frozenset[str] = frozenset()) -> int:
        """Streams that would begin before one more, which needs `tokens` of KV.

        All that wait do, but those of classes `behind` it; and of those that were just sent, what is more
        than there are places for. `places`: how many may run at a time.
        """
        self._forget_sent(now)
        stats = self._stats
        if stats is None:
            return self.unseen
        if stats.waiting:
            later = sum(count for name, count in stats.waiting_by.items() if name in behind)
            return max(0, stats.waiting - later) + self.unseen
        free = min(places - stats.running, (stats.kv_tokens - stats.kv_used_tokens) // max(1, tokens))
        return max(0, self.unseen - max(0, free - 1))

    def begins_in_s(self, ahead: int) -> float:
        """Seconds until one more stream would begin; infinite where nothing is known."""
        if ahead == 0:
            return 0.0
        return math.inf if not self._rate else ahead / self._rate
