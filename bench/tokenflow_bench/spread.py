"""Percentiles, and the spread of a figure over repetitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Spread", "median_interval", "percentile"]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is at least as large as `percent` of them (nearest rank); NaN for none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1]


_TWO_SIDED_95 = 1.96


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of what these are a sample of lies with 95 % confidence, whatever its distribution.

    By order statistics: how many lie below it is binomial (normal approximation, from ten values on). With
    fewer than six no two of them are so sure, and it is all of them. Raises `ValueError` for none.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    below = max(int((len(ordered) - _TWO_SIDED_95 * math.sqrt(len(ordered))) / 2), 1)
    return ordered[below - 1], ordered[-below]


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over repetitions. `missing` counts those that have none, for example a pause never seen."""

    median: float | None
    low: float | None
    high: float | None
    missing: int = 0

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Of the values that there are; all None without any."""
        given = list(values)
        known = [value for value in given if value is not None]
        if not known:
            return cls(None, None, None, len(given))
        return cls(median(known), min(known), max(known), len(given) - len(known))
