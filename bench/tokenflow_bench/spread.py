"""Percentiles, and the spread of a figure over repetitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Spread", "percentile"]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is at least as large as `percent` of them (nearest rank); NaN for none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1]


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
