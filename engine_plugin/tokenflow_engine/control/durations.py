"""How long things took, as counts by length: small enough to be sent five times a second."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tokenflow_engine.protocol import Durations

__all__ = ["BOUNDS_S", "DurationCounts"]

BOUNDS_S = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the classes, in seconds; one more class has what is longer."""


class DurationCounts:
    """Totals since the start, in classes between `bounds_s`."""

    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """A duration that equals a bound belongs below it."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def message(self) -> Durations:
        """As it crosses the link."""
        return Durations(bounds_s=list(self._bounds_s), counts=list(self._counts), sum_s=self._sum_s)
