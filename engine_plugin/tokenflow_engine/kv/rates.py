"""How fast copies are, measured as they finish."""

from __future__ import annotations

from collections import deque

__all__ = ["CopyRate"]

_WINDOW = 64


class CopyRate:
    """Bytes per second of the last copies of one direction, and totals of all."""

    def __init__(self, assumed_bytes_per_s: float) -> None:
        self._assumed = assumed_bytes_per_s
        self._window: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self.total_bytes = 0
        self.total_s = 0.0

    def add(self, copied_bytes: int, seconds: float) -> None:
        """One copy has finished."""
        self._window.append((copied_bytes, seconds))
        self.total_bytes += copied_bytes
        self.total_s += seconds

    @property
    def bytes_per_s(self) -> float:
        """What was assumed, until a copy has finished."""
        return self.measured_bytes_per_s or self._assumed

    @property
    def measured_bytes_per_s(self) -> float:
        """0 until a copy has finished."""
        seconds = sum(s for _, s in self._window)
        return sum(b for b, _ in self._window) / seconds if seconds > 0 else 0.0
