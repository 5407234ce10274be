"""How soon an engine would begin with one more stream, by what its plugin tells, or else by what was sent."""

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
_BY_CLASS = "adaptive"
"""The engine's policy under which heavier classes begin first; others have some order of arrival."""


class EngineLoad:
    """Of one engine. Times are of one monotonic clock."""

    __slots__ = ("_rate", "_recent", "_seen_at", "_sent", "_stats")

    def __init__(self) -> None:
        self._sent: deque[float] = deque()
        self._stats: EngineStats | None = None
        self._seen_at = 0.0
        self._recent = 0.0
        """Streams that have begun in a second, of late."""
        self._rate = 0.0
        """The same of the time in which somebody waited; 0 where nothing is known."""

    def note_stats(self, stats: EngineStats, now: float) -> None:
        """New figures of the engine."""
        before, elapsed_s = self._stats, now - self._seen_at
        self._stats, self._seen_at = stats, now
        while self._sent and now - self._sent[0] > _UNSEEN_S:
            self._sent.popleft()
        if before is None or elapsed_s <= 0 or stats.started_total < before.started_total:
            return
        rate = (stats.started_total - before.started_total) / elapsed_s
        share = -math.expm1(-elapsed_s / _SMOOTHING_S)
        self._recent += share * (rate - self._recent)
        if self._rate and before.waiting and stats.waiting:
            self._rate += share * (rate - self._rate)
        else:
            self._rate = max(self._recent, self._rate)  # nobody waited: it is at least so fast

    def forget(self) -> None:
        """The link is down: nothing is known."""
        self._stats, self._recent, self._rate = None, 0.0, 0.0

    def sent(self, now: float) -> None:
        """A stream was sent there."""
        self._forget_sent(now)
        self._sent.append(now)

    def opened(self) -> None:
        """One of those sent is on record now, as a stream of an engine that tells no figures."""
        if self._sent:
            self._sent.popleft()

    def unseen(self, now: float) -> int:
        """Streams sent that the engine's figures, or the record of those of one without, may not have."""
        self._forget_sent(now)
        return len(self._sent)

    def beyond(self, now: float, *, at_work: int, places: int) -> int:
        """Streams that would begin before one more, in an engine that tells nothing."""
        return max(0, at_work + self.unseen(now) - places)

    def _forget_sent(self, now: float) -> None:
        while self._sent and now - self._sent[0] > _LOST_S:
            self._sent.popleft()

    def ahead(self, now: float, *, places: int, tokens: int, behind: frozenset[str] = frozenset()) -> int:
        """Streams that would begin before one more, which needs `tokens` of KV.

        All that wait do, but those of classes `behind` it where the engine heeds classes; and of those that
        were just sent, what is more than there are places for. `places`: how many may run at a time.
        """
        stats, unseen = self._stats, self.unseen(now)
        if stats is None:
            return unseen
        if stats.waiting:
            if stats.policy.partition(":")[0] != _BY_CLASS:
                behind = frozenset()
            later = sum(count for name, count in stats.waiting_by.items() if name in behind)
            return max(0, stats.waiting - later) + unseen
        free = min(places - stats.running, (stats.kv_tokens - stats.kv_used_tokens) // max(1, tokens))
        return max(0, unseen - max(0, free - 1))

    def begins_in_s(self, ahead: int) -> float:
        """Seconds until one more stream would begin; infinite where nothing is known."""
        if ahead == 0:
            return 0.0
        return math.inf if self._rate == 0.0 else ahead / self._rate
