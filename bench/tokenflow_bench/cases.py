"""One simulated run: which set-up, how many people, who reads, which policy, which seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tokenflow_bench.bound import fluid_limit
from tokenflow_bench.costs import Machine
from tokenflow_bench.crowds import STEADY, crowd
from tokenflow_bench.recorded import Recorded
from tokenflow_bench.setups import SETUPS, Setup
from tokenflow_bench.simulated import measure
from tokenflow_bench.simulator import simulate
from tokenflow_bench.sla import Sla
from tokenflow_bench.timelines import timeline
from tokenflow_bench.variants import Variant
from tokenflow_bench.workload import Workload

__all__ = ["BOUND", "Case"]

BOUND = "bound"
"""In place of a policy: what no policy can be better than."""
_DIGITS = 6
_SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything that a run depends on. The same case gives the same figures."""

    setup: str
    """A name of `SETUPS`, or with `recorded` that of the trace."""
    policy: str
    """As in `variants`, or `BOUND`."""
    seed: int
    load: float | None = None
    """Sum of rates / capacity; None: `rates`, or the pace of what was `recorded`."""
    rates: tuple[tuple[float, float], ...] = ()
    """The paper's: tokens a second, and the share of the readers who read so fast."""
    readers: str = STEADY
    """As in `crowds`."""
    mix: tuple[Sla, ...] = ()
    machine: Machine | None = None
    """Instead of the set-up's."""
    recorded: Recorded | None = None
    """What arrives instead of a set-up's requests; needs a `machine`."""
    timeline: bool = False
    """Keep what is needed to draw the run."""

    def workload(self) -> Workload:
        """What arrives."""
        return crowd(self.readers, self.mix)(self._steady(), np.random.default_rng([self.seed, 1]))

    def _steady(self) -> Workload:
        if self.recorded is not None:
            return self.recorded.workload(self._machine(), self.load, self.seed)
        setup = self._setup()
        if self.load is None:
            return setup.at_rates(dict(self.rates), self.seed)
        return setup.workload(self.load, self.seed)

    def _machine(self) -> Machine:
        return self.machine or SETUPS[self.setup].machine

    def _setup(self) -> Setup:
        setup = SETUPS[self.setup]
        return setup if self.machine is None else replace(setup, machine=self.machine)

    def run(self) -> dict[str, Any]:
        """The case and its figures, for JSON."""
        workload, machine = self.workload(), self._machine()
        case = {name: value for name, value in asdict(self).items() if value not in ((), None, False)}
        if self.policy == BOUND:
            return case | {"figures": _rounded(asdict(fluid_limit(machine, workload)))}
        variant = Variant.parse(self.policy)
        outcome = simulate(
            machine,
            workload,
            variant.new_policy(),
            mixed=variant.mixed,
            without=variant.without,
            sample_s=_SAMPLE_S if self.timeline else float("inf"),
        )
        figures = measure(outcome, window_s=_window_s(workload)).document()
        drawn = {"timeline": _rounded(timeline(outcome))} if self.timeline else {}
        return case | {"figures": _rounded(figures)} | drawn


def _window_s(workload: Workload) -> float:
    """When everybody, served at once, would have read everything: the same for all policies."""
    return float((workload.arrived + workload.output / workload.rate).max())


def _rounded(value: Any) -> Any:
    """Floats with so many digits as mean something."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
