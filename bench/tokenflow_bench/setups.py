"""Named set-ups of the simulator: a machine and who comes to it.

Load is `sum of rates / capacity`, with the capacity of a memory full of streams half-way through their
answers, prompts' prefills included. It sets how fast the readers of the paper's bursts read, how many come in
other bursts, and how often people come in all other set-ups.

The paper's set-ups (TokenFlow, EuroSys '26): on a 4090 bursts of 60 and 80, Poisson arrivals of 2 and 4 a
second; on an H200 bursts of 400 and 200, Poisson arrivals of 5 and 10 a second, with answers twice as long.
It does not say for how long people arrive: here for `POISSON_S`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.bound import least_work_s
from tokenflow_bench.costs import MACHINES, Machine
from tokenflow_bench.people import READING_RATE, READING_SIGMA, lognormal_rates, mixed_rates
from tokenflow_bench.traces import Trace, read_trace
from tokenflow_bench.workload import (
    Workload,
    burst_arrivals,
    gamma_arrivals,
    normal_lengths,
    poisson_arrivals,
)

__all__ = ["AZURE", "POISSON_S", "SETUPS", "Setup"]

Floats = NDArray[np.float64]

AZURE = Path(__file__).parents[1] / "data" / "azure_llm_2023_conv.csv.gz"
"""An hour of conversations on Azure (CC BY 4.0); see the file beside it."""
POISSON_S = 30.0
"""For how long people arrive in the paper's Poisson set-ups; not in the paper."""
_STEADY_S = 60.0
_TRACE_S, _TRACE_RATE = 300.0, 15.0
_AZURE_PROMPT, _AZURE_OUTPUT = 1154.7, 211.1
"""Its means; known without reading it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Who comes to which machine. Lengths are means in tokens, rates tokens a second, times seconds."""

    name: str
    machine: Machine
    words: str
    prompt: float
    output: float
    arrivals: str
    """burst, poisson, gamma or trace."""
    count: int | None = None
    """Of a burst. None: as many as the load asks for."""
    per_s: float | None = None
    """Arrivals a second. None: as the load asks for."""
    seconds: float = _STEADY_S
    """For how long people arrive, but for a burst."""
    rate: float | None = None
    """Median of the readers. None: all read at the same rate, as fast as the load asks for."""
    sigma: float = 0.1
    """Of the logarithm of the rates between readers."""

    @property
    def capacity(self) -> float:
        """Tokens a second of this machine with this traffic."""
        return self.machine.capacity(self.prompt + self.output / 2, prompt_share=self.prompt / self.output)

    def workload(self, load: float, seed: int) -> Workload:
        """What arrives at this load."""
        if self.arrivals == "trace":
            return self._replayed(load, seed)
        rng = np.random.default_rng(seed)
        rate, sigma = self.rate, self.sigma
        if rate is None:
            count = self._count(load, 1.0)
            rate, sigma = load * self.capacity / count, 0.0
        else:
            count = self._count(load, rate)
        times = self._times(rng, count, load)
        return self._of(rng, times, lognormal_rates(rng, count, median=rate, sigma=sigma))

    def at_rates(self, shares: Mapping[float, float], seed: int) -> Workload:
        """What arrives in the paper, with `shares` of the readers at each rate."""
        rng = np.random.default_rng(seed)
        count = self._count(1.0, 1.0)
        times = self._times(rng, count, 1.0)
        return self._of(rng, times, mixed_rates(rng, count, shares=dict(shares)))

    def _of(self, rng: np.random.Generator, times: Floats, rates: Floats) -> Workload:
        count = len(times)
        return Workload.of(
            times,
            normal_lengths(rng, count, mean=self.prompt),
            normal_lengths(rng, count, mean=self.output),
            rates,
        )

    def _count(self, load: float, rate: float) -> int:
        if self.count is not None:
            return self.count
        if self.arrivals == "burst":
            return max(round(load * self.capacity / rate), 1)
        return max(round(self._arrivals_per_s(load) * self.seconds), 1)

    def _arrivals_per_s(self, load: float) -> float:
        return self.per_s or load * self.capacity / self.output

    def _times(self, rng: np.random.Generator, count: int, load: float) -> Floats:
        if self.arrivals == "burst":
            return burst_arrivals(count)
        draw = gamma_arrivals if self.arrivals == "gamma" else poisson_arrivals
        return draw(rng, count, per_s=self._arrivals_per_s(load))

    def _replayed(self, load: float, seed: int) -> Workload:
        """A part of the trace, another one for each seed, at so fast a pace that the load is right.

        Lengths change over the hour, so the part's own work counts: it comes within `least_work_s / load`.
        """
        assert self.rate is not None, "the readers of a trace have a rate"
        rng = np.random.default_rng(seed)
        trace = _azure()
        assert trace.arrived is not None, "Azure's traces have times"
        count = min(round(self._arrivals_per_s(load) * self.seconds), len(trace))
        rows = slice(first := int(rng.integers(len(trace) - count + 1)), first + count)
        part = Workload.of(
            trace.arrived[rows] - trace.arrived[first],
            trace.prompt[rows],
            trace.output[rows],
            lognormal_rates(rng, count, median=self.rate, sigma=self.sigma),
        )
        takes_s = least_work_s(self.machine, part) / load
        return replace(part, arrived=part.arrived * takes_s / part.arrived[-1])


@cache
def _azure() -> Trace:
    return read_trace(AZURE)


def _of_the_paper(
    machine: str, *, bursts: tuple[int, int], per_s: tuple[float, float], output: float
) -> Iterator[Setup]:
    engine = MACHINES[machine]
    for letter, count, prompt in zip("ab", bursts, (512.0, 1024.0), strict=True):
        yield Setup(
            name=f"{machine}-{letter}",
            machine=engine,
            words=f"the paper's ({letter}): a burst of {count}",
            prompt=prompt,
            output=output,
            arrivals="burst",
            count=count,
        )
    for letter, often in zip("cd", per_s, strict=True):
        yield Setup(
            name=f"{machine}-{letter}",
            machine=engine,
            words=f"the paper's ({letter}): Poisson, {often:g} a second for {POISSON_S:g} s",
            prompt=512.0,
            output=output,
            arrivals="poisson",
            per_s=often,
            seconds=POISSON_S,
        )


def _others(machine: str) -> Iterator[Setup]:
    engine = MACHINES[machine]
    yield Setup(
        name=f"{machine}-human",
        machine=engine,
        words="a burst of people who read silently",
        prompt=512.0,
        output=512.0,
        arrivals="burst",
        rate=READING_RATE,
        sigma=READING_SIGMA,
    )
    for arrivals, rate in (("poisson", 20.0), ("gamma", 15.0)):
        yield Setup(
            name=f"{machine}-{arrivals}",
            machine=engine,
            words="Poisson arrivals" if arrivals == "poisson" else "arrivals as in BurstGPT (Gamma)",
            prompt=512.0,
            output=512.0,
            arrivals=arrivals,
            rate=rate,
        )
    yield Setup(
        name=f"{machine}-azure",
        machine=engine,
        words="conversations on Azure, replayed",
        prompt=_AZURE_PROMPT,
        output=_AZURE_OUTPUT,
        arrivals="trace",
        seconds=_TRACE_S,
        rate=_TRACE_RATE,
    )


def _laptop(name: str, prompt: float, output: float, rate: float) -> Iterator[Setup]:
    for arrivals in ("burst", "poisson", "gamma"):
        yield Setup(
            name=f"{name}-{arrivals}",
            machine=MACHINES[f"laptop-{name}"],
            words=f"two CPU cores, {arrivals}",
            prompt=prompt,
            output=output,
            arrivals=arrivals,
            rate=rate,
            seconds=200.0,
        )


def _all() -> Iterator[Setup]:
    for machine in ("4090", "4090-qwen"):
        yield from _of_the_paper(machine, bursts=(60, 80), per_s=(2.0, 4.0), output=2048.0)
    for machine in ("h200", "h200-qwen"):
        yield from _of_the_paper(machine, bursts=(400, 200), per_s=(5.0, 10.0), output=4096.0)
    for machine in ("4090", "4090-qwen", "a6000", "h200", "h200-qwen"):
        yield from _others(machine)
    yield from _laptop("tiny", 60.0, 250.0, 17.5)
    yield from _laptop("smollm2", 60.0, 200.0, 5.0)


SETUPS = {setup.name: setup for setup in _all()}
