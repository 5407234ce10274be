"""Readers: how fast they read and when they pause. Synthetic: no public data on pauses was found.

Rates are fixed, mixed, or lognormal between users (most of the variance of reading speed is between readers).
A reader reads on without end or pauses for a while at times: exponential distances and lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pauses", "fixed_rates", "lognormal_rates", "mixed_rates"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between pauses, the first token counting as the end of one, and seconds that a pause lasts."""

    every_s: float
    last_s: float

    def of_one(self, rng: np.random.Generator, *, until_s: float) -> list[tuple[float, float]]:
        """Beginnings and ends, in seconds after the first token, as far as `until_s`."""
        pauses = []
        at = float(rng.exponential(self.every_s))
        while at < until_s:
            end = at + float(rng.exponential(self.last_s))
            pauses.append((at, end))
            at = end + float(rng.exponential(self.every_s))
        return pauses


def fixed_rates(count: int, *, rate: float) -> Floats:
    """All the same."""
    return np.full(count, rate)


def mixed_rates(rng: np.random.Generator, count: int, *, shares: dict[float, float]) -> Floats:
    """`shares`: of readers at each rate, e.g. the paper's 40 % at 15 and 60 % at 20 tokens a second."""
    return rng.choice(list(shares), size=count, p=list(shares.values()))


def lognormal_rates(
    rng: np.random.Generator, count: int, *, median: float = 5.3, sigma: float = 0.27
) -> Floats:
    """Silent reading of English: 238 words a minute, most adults 175 to 300 (Brysbaert 2019)."""
    return rng.lognormal(np.log(median), sigma, count)
