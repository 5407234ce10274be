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

Work = Sequence[tuple[Setup, Sequence[Comparison]]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan, each set-up's comparisons, and what all is thought to take, in seconds."""

    plan: Plan
    work: Work
    seconds: float


def schedule(plan: Plan, setups: Sequence[Setup], *, within_s: float) -> Schedule:
    """With the most rounds that fit, at least one.

    The first set-up alone also has the other policies, in overload, the pauses and the parts taken away.
    """
    for rounds in range(_MOST_ROUNDS, 0, -1):
        found = _with_rounds(replace(plan, runs=rounds), setups)
        if found.seconds <= within_s:
            break
    return found


def _with_rounds(plan: Plan, setups: Sequence[Setup]) -> Schedule:
    fewer = max(plan.runs - _SHORTER, 1)
    ours = replace(plan, policies=(OURS,))
    overloaded = replace(ours, loads=(_OVERLOAD,))
    work = []
    for number, setup in enumerate(setups):
        comparisons = burst(ours, setup)
        if not number:
            below = [comparison for comparison in comparisons if comparison.load != _OVERLOAD]
            everybody = burst(replace(overloaded, policies=setup.policies), setup)
            short = [*pauses(overloaded, setup), *_only_parts(ablation(overloaded, setup))]
            comparisons = [*below, *everybody, *(replace(one, runs=fewer) for one in short)]
        work.append((setup, comparisons))
    takes_s = sum(seconds(plan, setup, comparisons) for setup, comparisons in work)
    return Schedule(plan, work, takes_s)


def _only_parts(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """What is known of pauses is among `pauses` already."""
    return [comparison for comparison in comparisons if not comparison.pausing]
