"""How often something that died is started again."""

from __future__ import annotations

from collections import deque

__all__ = ["RestartBudget"]


class RestartBudget:
    """At most `limit` restarts within `window_s` seconds, each after a longer pause than the one before."""

    def __init__(self, *, limit: int = 3, window_s: float = 300.0) -> None:
        self._limit = limit
        self._window_s = window_s
        self._at: deque[float] = deque()

    def spend(self, now_s: float) -> float | None:
        """Take one restart: the seconds to wait before it (1, 4, 16), or None when none is left."""
        while self._at and now_s - self._at[0] > self._window_s:
            self._at.popleft()
        if len(self._at) >= self._limit:
            return None
        self._at.append(now_s)
        return 4.0 ** (len(self._at) - 1)
