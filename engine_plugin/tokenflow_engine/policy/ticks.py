"""The clock of policies that decide at intervals, as the papers' do."""

from __future__ import annotations

__all__ = ["Ticks"]


class Ticks:
    """Due at the first look, then each `interval_s` seconds, and at once where time has gone back."""

    __slots__ = ("_interval_s", "next_at")

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.next_at = float("-inf")

    def due(self, now: float) -> bool:
        """Whether an interval begins at `now`; the next one is then set."""
        if self.next_at - self._interval_s <= now < self.next_at:
            return False
        self.next_at = now + self._interval_s
        return True
