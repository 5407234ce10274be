"""Which runs fit into the time: every comparison, with as many rounds as there is time for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenflow_bench.burst.scenarios import Comparison, Plan, ablation, burst, pauses, seconds
from tokenflow_bench.burst.setups import Setup
from tokenflow_bench.burst.targets import OURS

__all__ = ["Schedule", "schedule"]

_MOST_ROUNDS = 5
_SHORTER = 2
"""Pauses and parts taken away get so many rounds less."""
_OVERLOAD = 1.2
_OVERRUN = 1.2
"""Runs take longer than `scenarios.seconds` says: readers of stock scheduling wait for their beginning."""
_CALIBRATION_S = 120.0
"""Of one set-up, the engine's start included."""

Work = Sequence[tuple[Setup, Sequence[Comparison]]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan, each set-up's comparisons, and what all is thought to take, in seconds."""

    plan: Plan
    work: Work
    seconds: float


def schedule(plan: Plan, setups: Sequence[Setup], *, within_s: float) -> Schedule:
    """With the most rounds that fit, at least one; the parts and pauses on the first set-up alone."""
    plan = replace(plan, policies=(OURS,))
    for rounds in range(_MOST_ROUNDS, 0, -1):
        found = _with_rounds(replace(plan, runs=rounds), setups)
        if found.seconds <= within_s:
            break
    return found


def _with_rounds(plan: Plan, setups: Sequence[Setup]) -> Schedule:
    fewer = max(plan.runs - _SHORTER, 1)
    overloaded = replace(plan, loads=(_OVERLOAD,))
    work = []
    for number, setup in enumerate(setups):
        comparisons = burst(plan, setup)
        if not number:
            short = [*pauses(overloaded, setup), *_only_parts(ablation(overloaded, setup))]
            comparisons += [replace(comparison, runs=fewer) for comparison in short]
        work.append((setup, comparisons))
    takes_s = sum(seconds(plan, setup, comparisons) for setup, comparisons in work)
    return Schedule(plan, work, _OVERRUN * takes_s + _CALIBRATION_S * len(setups))


def _only_parts(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """What is known of pauses is among `pauses` already."""
    return [comparison for comparison in comparisons if not comparison.pausing]
