"""What arrives: requests with lengths, times, readers and classes. The same seed gives the same workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.reading import Person, Span
from tokenflow_bench.sla import ONE_CLASS, Sla

__all__ = [
    "BURSTGPT_SHAPE",
    "Schedule",
    "Workload",
    "burst_arrivals",
    "gamma_arrivals",
    "lognormal_lengths",
    "normal_lengths",
    "poisson_arrivals",
    "sharegpt_lengths",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BURSTGPT_SHAPE = 0.5
"""Of the Gamma distribution of times between arrivals: what BurstGPT's own generator takes
(github.com/HPMLL/BurstGPT, `gamma_shape`); the paper (arXiv 2401.17644) models arrivals as Gamma."""
SHAREGPT_PROMPT, SHAREGPT_OUTPUT = 161.31, 337.99
"""Mean tokens of ShareGPT's prompts and answers, as remembered from figure 11 of vLLM's paper (SOSP '23): an
assumption, not checked against the paper or the data. The set's means depend on how it is filtered and cut
into turns: in a run of `vllm bench serve` 1,000 requests have 230 and 203 (its pull request 18566).
"""
LENGTH_SIGMA = 0.9
"""Of the logarithms of lengths: between 0.99 of prompts and 0.86 of answers in Azure's conversations of 2023.
ShareGPT's own is not in the papers."""


class Schedule(Protocol):
    """Draws when a reader scans and pauses: `people.Pauses`, `people.Scanning`."""

    def spans(self, rng: np.random.Generator, *, until_s: float) -> tuple[Span, ...]:
        """A `Person`'s spans, as far as `until_s` seconds after the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Columns, one row a request, sorted by arrival. Tokens, seconds, tokens a second."""

    arrived: Floats
    prompt: Ints
    output: Ints
    max_output: Ints
    rate: Floats
    weight: Floats
    ttft_target: Floats
    machine: NDArray[np.bool_]
    may_park: NDArray[np.bool_]
    sla: Ints
    """Of each request, its place in `classes`."""
    classes: tuple[Sla, ...] = (ONE_CLASS,)
    spans: tuple[tuple[Span, ...], ...] = field(default=())
    """Of each request, when its reader scans and pauses, as in `reading.Person`; empty: all read steadily."""

    def __len__(self) -> int:
        return len(self.arrived)

    @classmethod
    def of(
        cls,
        arrived: Floats,
        prompt: Ints,
        output: Ints,
        rate: Floats,
        *,
        max_output: Ints | None = None,
        ttft_target_s: float = ONE_CLASS.ttft_target_s,
    ) -> Workload:
        """People of one class. `max_output`: what clients ask for; by default exactly what they get."""
        count = len(arrived)
        assert bool((np.diff(arrived) >= 0).all()), "requests come in order of arrival"
        assert max_output is None or bool((max_output >= output).all()), "nobody gets more than was asked for"
        return cls(
            arrived=arrived,
            prompt=prompt,
            output=output,
            max_output=output.copy() if max_output is None else max_output,
            rate=rate,
            weight=np.ones(count),
            ttft_target=np.full(count, ttft_target_s),
            machine=np.zeros(count, dtype=bool),
            may_park=np.ones(count, dtype=bool),
            sla=np.zeros(count, dtype=np.int64),
            classes=(replace(ONE_CLASS, ttft_target_s=ttft_target_s),),
        )

    def person(self, row: int) -> Person:
        """Who reads the answer to this request."""
        if self.machine[row]:
            return Person(math.inf)
        return Person(float(self.rate[row]), self.spans[row] if self.spans else ())

    def class_of(self, row: int) -> Sla:
        """The class of this request."""
        return self.classes[int(self.sla[row])]

    def with_pauses(self, schedule: Schedule, rng: np.random.Generator) -> Workload:
        """The same with readers who pause, or scan and pause."""
        longest = 4.0 * float((self.output / self.rate).max())
        return replace(
            self, spans=tuple(tuple(schedule.spans(rng, until_s=longest)) for _ in range(len(self)))
        )

    def with_classes(self, mix: Sequence[Sla], rng: np.random.Generator) -> Workload:
        """The same with each request in one of the classes, drawn by their shares."""
        shares = np.array([sla.share for sla in mix])
        drawn = rng.choice(len(mix), size=len(self), p=shares / shares.sum())
        rates = np.array([math.nan if sla.rate is None else sla.rate for sla in mix])[drawn]
        return replace(
            self,
            sla=drawn,
            classes=tuple(mix),
            weight=np.array([sla.weight for sla in mix])[drawn],
            ttft_target=np.array([sla.ttft_target_s for sla in mix])[drawn],
            may_park=np.array([sla.may_park for sla in mix])[drawn],
            rate=np.where(np.isnan(rates), self.rate, rates),
        )

    def with_machines(self, share: float, rng: np.random.Generator) -> Workload:
        """The same with this share of the requests made by programs, which take all as fast as it comes."""
        return replace(self, machine=rng.random(len(self)) < share)


def burst_arrivals(count: int) -> Floats:
    """All at once."""
    return np.zeros(count)


def poisson_arrivals(rng: np.random.Generator, count: int, *, per_s: float) -> Floats:
    """Independent of each other."""
    return np.cumsum(rng.exponential(1.0 / per_s, count))


def gamma_arrivals(
    rng: np.random.Generator, count: int, *, per_s: float, shape: float = BURSTGPT_SHAPE
) -> Floats:
    """Burstier than Poisson for `shape` below 1; times between arrivals deviate by mean / sqrt(shape)."""
    return np.cumsum(rng.gamma(shape, 1.0 / (per_s * shape), count))


def normal_lengths(rng: np.random.Generator, count: int, *, mean: float, spread: float = 0.25) -> Ints:
    """Normally distributed, as in the paper; `spread` is the deviation as a share of the mean."""
    return np.maximum(rng.normal(mean, spread * mean, count), max(0.1 * mean, 1.0)).astype(np.int64)


def lognormal_lengths(
    rng: np.random.Generator, count: int, *, mean: float, sigma: float = LENGTH_SIGMA, most: int | None = None
) -> Ints:
    """Many short ones and a long tail: exp(N(ln mean - sigma^2 / 2, sigma)), from 1 token to `most`."""
    drawn = np.maximum(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count), 1.0)
    return np.minimum(drawn, most if most is not None else np.inf).astype(np.int64)


def sharegpt_lengths(rng: np.random.Generator, count: int, *, most: int = 2048) -> tuple[Ints, Ints]:
    """Prompts and answers about as long as ShareGPT's (`SHAREGPT_PROMPT`), lognormal, up to `most`."""
    return (
        lognormal_lengths(rng, count, mean=SHAREGPT_PROMPT, most=most),
        lognormal_lengths(rng, count, mean=SHAREGPT_OUTPUT, most=most),
    )
