"""Named set-ups: a machine and a workload whose readers want a given share of what it can generate.

Load is `sum of rates / capacity`, with the capacity of a memory full of streams half-way through their
answers. Bursts keep the paper's numbers of requests and take the rate from the load; people arrive one by one
(Poisson) at fixed rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tokenflow_bench.costs import MACHINES, Machine
from tokenflow_bench.people import fixed_rates, lognormal_rates
from tokenflow_bench.workload import (
    Workload,
    burst_arrivals,
    gamma_arrivals,
    normal_lengths,
    poisson_arrivals,
)

__all__ = ["SETUPS", "Setup"]


@dataclass(frozen=True, slots=True)
class Setup:
    """`workload(load, seed)` makes what arrives at `machine`."""

    machine: Machine
    workload: Callable[[float, int], Workload]


def _burst(machine: str, count: int, prompt: float, output: float) -> Setup:
    engine = MACHINES[machine]

    def workload(load: float, seed: int) -> Workload:
        rng = np.random.default_rng(seed)
        rate = load * engine.capacity(prompt + output / 2) / count
        return Workload.of(
            burst_arrivals(count),
            normal_lengths(rng, count, mean=prompt),
            normal_lengths(rng, count, mean=output),
            fixed_rates(count, rate=rate),
        )

    return Setup(engine, workload)


def _people(
    machine: str,
    count: int,
    prompt: float,
    output: float,
    *,
    rate: float,
    arrivals: str,
    sigma: float = 0.1,
) -> Setup:
    """`arrivals`: "burst" (as many people as the load asks for, at once), "poisson" or "gamma"."""
    engine = MACHINES[machine]
    capacity = engine.capacity(prompt + output / 2)

    def workload(load: float, seed: int) -> Workload:
        rng = np.random.default_rng(seed)
        at_once = max(round(load * capacity / rate), 1)
        people = at_once if arrivals == "burst" else count
        times = {
            "burst": lambda: burst_arrivals(people),
            "poisson": lambda: poisson_arrivals(rng, people, per_s=load * capacity / output),
            "gamma": lambda: gamma_arrivals(rng, people, per_s=load * capacity / output),
        }[arrivals]()
        return Workload.of(
            times,
            normal_lengths(rng, people, mean=prompt),
            normal_lengths(rng, people, mean=output),
            lognormal_rates(rng, people, median=rate, sigma=sigma),
        )

    return Setup(engine, workload)


SETUPS = {
    "4090-a": _burst("4090", 60, 512, 1024 + 1024),
    "4090-b": _burst("4090", 80, 1024, 2048),
    "4090-human": _people("4090", 0, 512, 512, rate=5.3, sigma=0.27, arrivals="burst"),
    "4090-poisson": _people("4090", 150, 512, 512, rate=20.0, arrivals="poisson"),
    "4090-gamma": _people("4090", 150, 512, 512, rate=15.0, arrivals="gamma"),
    "tiny-burst": _people("laptop-tiny", 0, 60, 250, rate=17.5, arrivals="burst"),
    "tiny-poisson": _people("laptop-tiny", 300, 60, 250, rate=17.5, arrivals="poisson"),
    "tiny-gamma": _people("laptop-tiny", 300, 60, 250, rate=17.5, arrivals="gamma"),
    "smollm2-burst": _people("laptop-smollm2", 0, 60, 200, rate=5.0, arrivals="burst"),
    "smollm2-poisson": _people("laptop-smollm2", 100, 60, 200, rate=5.0, arrivals="poisson"),
}
