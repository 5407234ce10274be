"""What arrives: requests with lengths, times and readers. The same seed gives the same workload."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.people import Pauses

__all__ = ["Workload", "burst_arrivals", "gamma_arrivals", "normal_lengths", "poisson_arrivals"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
    pauses: tuple[tuple[tuple[float, float], ...], ...] = field(default=())
    """Of each request, seconds after its first token; empty: nobody pauses."""

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
        ttft_target_s: float = 1.0,
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
        )

    def with_pauses(self, pauses: Pauses, rng: np.random.Generator) -> Workload:
        """The same with readers who pause."""
        longest = 4.0 * float((self.output / self.rate).max())
        return replace(
            self, pauses=tuple(tuple(pauses.of_one(rng, until_s=longest)) for _ in range(len(self)))
        )


def burst_arrivals(count: int) -> Floats:
    """All at once."""
    return np.zeros(count)


def poisson_arrivals(rng: np.random.Generator, count: int, *, per_s: float) -> Floats:
    """Independent of each other."""
    return np.cumsum(rng.exponential(1.0 / per_s, count))


def gamma_arrivals(rng: np.random.Generator, count: int, *, per_s: float, shape: float = 0.25) -> Floats:
    """Burstier than Poisson for `shape` below 1 (BurstGPT)."""
    return np.cumsum(rng.gamma(shape, 1.0 / (per_s * shape), count))


def normal_lengths(rng: np.random.Generator, count: int, *, mean: float, spread: float = 0.25) -> Ints:
    """Normally distributed, as in the paper; `spread` is the deviation as a share of the mean."""
    return np.maximum(rng.normal(mean, spread * mean, count), 0.1 * mean).astype(np.int64)
