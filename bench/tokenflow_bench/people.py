"""Readers: how fast they read, when they scan and when they pause.

Rates are fixed, mixed, or lognormal between users (88 % of the variance of reading speed is between readers,
IReST). How people pause over streamed answers is an assumption, and synthetic wherever it is used: no public
data was found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.reading import Span, pause_spans

__all__ = [
    "READING_RATE",
    "READING_SIGMA",
    "SPEECH_RATE",
    "SPEECH_SIGMA",
    "Pauses",
    "Scanning",
    "fixed_rates",
    "listening_rates",
    "lognormal_rates",
    "mixed_rates",
]

Floats = NDArray[np.float64]

READING_RATE, READING_SIGMA = 5.3, 0.27
"""Silent reading of English: 238 words a minute, most adults 175 to 300 (Brysbaert 2019).
1.33 tokens a word."""
SPEECH_RATE, SPEECH_SIGMA = 4.1, 0.16
"""Aloud: 183 words a minute (Brysbaert 2019); across 17 languages 184 with a deviation of 29
(Trauzettel-Klosinski and Dietz 2012)."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between pauses, the first token counting as the end of one, and seconds that a pause lasts.

    Both are means of exponential distributions.
    """

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

    def spans(self, rng: np.random.Generator, *, until_s: float) -> tuple[Span, ...]:
        """The same as a `Person`'s spans."""
        return pause_spans(self.of_one(rng, until_s=until_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanning:
    """Three states, a Markov chain in continuous time: read, then scan or pause, then read again.

    A stay in each lasts exponentially long, with these means in seconds; scanning is `factor` times as fast
    as reading. Paused is (1 - scan_share) pause_s / (read_s + scan_share scan_s + (1 - scan_share) pause_s)
    of the time.
    """

    read_s: float = 12.0
    scan_s: float = 2.0
    pause_s: float = 4.0
    factor: float = 3.0
    scan_share: float = 0.5
    """Of the stays after reading, those that scan."""

    def spans(self, rng: np.random.Generator, *, until_s: float) -> tuple[Span, ...]:
        """A `Person`'s, as far as `until_s` after the first token."""
        spans: list[Span] = []
        at = 0.0
        while at < until_s:
            is_scan = rng.random() < self.scan_share
            read_s = float(rng.exponential(self.read_s))
            other_s = float(rng.exponential(self.scan_s if is_scan else self.pause_s))
            spans += [(read_s, 1.0), (other_s, self.factor if is_scan else 0.0)]
            at += read_s + other_s
        return tuple(spans)


def fixed_rates(count: int, *, rate: float) -> Floats:
    """All the same."""
    return np.full(count, rate)


def mixed_rates(rng: np.random.Generator, count: int, *, shares: dict[float, float]) -> Floats:
    """`shares`: of readers at each rate, e.g. the paper's 40 % at 15 and 60 % at 20 tokens a second."""
    return rng.choice(list(shares), size=count, p=list(shares.values()))


def lognormal_rates(
    rng: np.random.Generator, count: int, *, median: float = READING_RATE, sigma: float = READING_SIGMA
) -> Floats:
    """One rate for each user; by default people who read English."""
    return rng.lognormal(np.log(median), sigma, count)


def listening_rates(rng: np.random.Generator, count: int, *, median: float = SPEECH_RATE) -> Floats:
    """At the pace of speech, which varies less: for answers that are spoken."""
    return rng.lognormal(np.log(median), SPEECH_SIGMA, count)
