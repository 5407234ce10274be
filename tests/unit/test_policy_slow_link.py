"""A link that is slow for the memory behind it: turns last longer, loads start early and do not queue."""

from __future__ import annotations

from dataclasses import replace

from support.plans import Row, check, names, view_of
from tokenflow_bench.costs import Machine
from tokenflow_bench.setups import SETUPS
from tokenflow_bench.simulated import Metrics, measure
from tokenflow_bench.simulator import simulate
from tokenflow_engine.policy.base import Phase
from tokenflow_engine.policy.registry import policy_named

GAMMA = SETUPS["4090-gamma"]
SLOW = replace(GAMMA.machine, to_host_bytes_s=4e9, to_device_bytes_s=4e9, to_device_busy_bytes_s=2e9)
"""Its memory takes 1.4 s to load, 2.7 s while it is written too."""


def _overload(**options: float) -> Metrics:
    return measure(simulate(SLOW, GAMMA.workload(1.5, seed=1), policy_named("adaptive", **options)))


def test_turns_are_long_enough_for_the_link() -> None:
    ours, hasty = _overload().summary, _overload(loading_share=1e9).summary
    assert ours.stall_free_share >= 0.95
    assert hasty.stall_free_share < 0.5, "negative control"
    assert min(ours.raw_tokens_per_s, hasty.raw_tokens_per_s) > 1400, "1,110 if loads queue in memory"


def _away(count: int, *, slack_s: float, context: int) -> list[Row]:
    return [Row(phase=Phase.OFFLOADED, generated=200, buffered=10.0 * slack_s, context=context)] * count


def _loads(away: list[Row], machine: Machine, **options: float) -> tuple[int, float]:
    """How many of them come back at once, and in how many seconds the next plan is made, at the latest."""
    batch = [Row(phase=Phase.RUNNING, generated=2000, buffered=600.0)] * 40
    view = view_of(*batch, *away, machine=machine)
    plan = policy_named("adaptive", **options).plan(view, names(view))
    check(view, plan)
    return len(plan.load), plan.next_at - view.now


def test_many_who_are_needed_at_one_time_start_early() -> None:
    """Three seconds are enough for the loads of forty, and too short for those of two hundred."""
    few, many = (_away(count, slack_s=3.0, context=2000) for count in (40, 200))
    machine = GAMMA.machine
    assert _loads(few, machine)[0] == 0
    assert _loads(many, machine)[0] > 0
    assert _loads(many, machine, loading_share=1e9)[0] == 0, "negative control: loads that take no time"


def test_newcomers_wait_while_loads_are_late() -> None:
    """A quarter of a second of text, and over a second of loads. But nobody waits for ever."""
    away = _away(40, slack_s=0.25, context=1000)
    batch = [Row(phase=Phase.RUNNING, generated=2000, buffered=600.0)] * 40

    def admitted(machine: Machine, *, weight: float = 1.0, waited: float = 0.0, **options: float) -> int:
        newcomer = Row(phase=Phase.WAITING, weight=weight, waited=waited)
        view = view_of(*batch, *away, newcomer, free=20_000, machine=machine)
        plan = policy_named("adaptive", **options).plan(view, names(view))
        check(view, plan)
        return len(plan.admit)

    assert admitted(SLOW) == 0
    assert admitted(SLOW, weight=2.0) == 1, "of a class that has none late"
    assert admitted(SLOW, late_s=1e9) == 1, "negative control"
    assert [admitted(SLOW, waited=waited) for waited in (15.0, 25.0)] == [0, 1]


def test_a_load_that_would_only_queue_is_ordered_later() -> None:
    dry = _away(20, slack_s=0.1, context=300)
    assert _loads(dry, GAMMA.machine)[0] == 20, "negative control: done before the next plan"
    count, again_s = _loads(dry, SLOW)
    assert 0 < count <= 6
    assert again_s < 0.05, "and its turn comes soon"
