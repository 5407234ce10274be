"""What holds for every policy and every view."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.plans import NOW, Row, check, names, view_of
from tokenflow_bench.costs import MACHINES
from tokenflow_bench.metrics import StreamFigures
from tokenflow_bench.people import Pauses, lognormal_rates
from tokenflow_bench.simulated import records
from tokenflow_bench.simulator import simulate
from tokenflow_bench.views import random_view
from tokenflow_bench.workload import Workload, normal_lengths, poisson_arrivals
from tokenflow_engine.policy.base import EngineView, Phase, Place, Plan, Reason
from tokenflow_engine.policy.registry import POLICIES, policy_named

TINY = MACHINES["laptop-tiny"]

all_policies = pytest.mark.parametrize("name", list(POLICIES))


@st.composite
def views(draw: st.DrawFn) -> EngineView:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_view(
        rng,
        machine=replace(TINY, page_tokens=draw(st.sampled_from([1, 16]))),
        running=draw(st.integers(0, 24)),
        waiting=draw(st.integers(0, 24)),
        fill=draw(st.sampled_from([0.3, 0.7, 0.99, 1.0])),
        people=draw(st.sampled_from([0.0, 0.5, 1.0])),
        parkable=draw(st.sampled_from([0.0, 0.8, 1.0])),
        now=draw(st.sampled_from([1.0, 50.0])),
    )


@all_policies
@settings(max_examples=150, deadline=None)
@given(view=views())
def test_plans_keep_to_memory_batch_and_phases(name: str, view: EngineView) -> None:
    check(view, policy_named(name).plan(view, names(view)), frees_memory=name != "fcfs")


@all_policies
@settings(max_examples=25, deadline=None)
@given(history=st.lists(views(), min_size=1, max_size=4))
def test_equal_histories_give_equal_plans(name: str, history: list[EngineView]) -> None:
    """As on the ranks of a tensor-parallel engine."""
    one, other = policy_named(name), policy_named(name)
    for view in history:
        assert one.plan(view, names(view)) == other.plan(view, names(view))


@all_policies
def test_without_readers_the_engine_does_as_it_would(name: str) -> None:
    rng = np.random.default_rng(3)
    view = random_view(rng, machine=TINY, running=20, waiting=20, people=0.0)
    waiting = np.where(view.phase == Phase.OFFLOADED, Phase.WAITING, view.phase)
    waiting = np.where(waiting == Phase.PARKED, Phase.RUNNING, waiting).astype(np.int8)
    assert policy_named(name).plan(replace(view, phase=waiting), names(view)).stock


@all_policies
def test_with_nobody_waiting_and_ample_memory_the_engine_does_as_it_would(name: str) -> None:
    view = view_of(*[Row(phase=Phase.RUNNING, buffered=50) for _ in range(8)], free=20_000)
    assert policy_named(name).plan(view, names(view)).stock


@all_policies
@pytest.mark.parametrize("seed", [1, 2])
def test_nobody_starves(name: str, seed: int) -> None:
    """Machines, pauses, classes and an overload that ends: all finish, and nobody waits without bound.

    The bound: twice the time in which the stock engine is done with everything, and 30 s.
    """
    rng = np.random.default_rng(seed)
    count = 90
    workload = Workload.of(
        poisson_arrivals(rng, count, per_s=6.0),
        normal_lengths(rng, count, mean=60),
        normal_lengths(rng, count, mean=200),
        lognormal_rates(rng, count, median=15.0),
    ).with_pauses(Pauses(every_s=10.0, last_s=5.0), rng)
    workload = replace(
        workload, machine=rng.random(count) < 0.2, weight=rng.choice([1.0, 4.0], count, p=[0.7, 0.3])
    )
    stock = simulate(TINY, workload, policy_named("fcfs"))
    outcome = simulate(TINY, workload, policy_named(name))
    assert (outcome.streams.generated == workload.output).all()
    waits = [
        StreamFigures.of(record, horizon_s=outcome.duration_s, window_s=outcome.duration_s).wait_s
        for record in records(outcome)
    ]
    assert max(waits) <= 2 * stock.duration_s + 30.0


def _broken_plans() -> dict[str, Plan]:
    reasons = dict.fromkeys(range(5), Reason.URGENT)
    return {
        "more than is free": Plan(admit=[3], reasons=reasons, next_at=NOW + 1),
        "a fixed row": Plan(evict=[2], reasons=reasons, next_at=NOW + 1),
        "a wrong phase": Plan(resume=[0], reasons=reasons, next_at=NOW + 1),
        "a row twice": Plan(evict=[0], park=[0], reasons=reasons, next_at=NOW + 1),
        "no reason": Plan(evict=[0, 1], load=[(4, Place.LOAD)], next_at=NOW + 1),
        "no time": Plan(evict=[0, 1], reasons=reasons, next_at=NOW),
        "not stock": Plan(stock=True, evict=[0]),
    }


@pytest.mark.parametrize("plan", _broken_plans().values(), ids=_broken_plans().keys())
def test_the_rules_can_be_broken(plan: Plan) -> None:
    """Negative control of the rules themselves."""
    view = view_of(
        Row(phase=Phase.RUNNING),
        Row(phase=Phase.RUNNING),
        Row(phase=Phase.RUNNING, may_park=False),
        Row(phase=Phase.WAITING),
        Row(phase=Phase.OFFLOADED),
        free=100,
    )
    with pytest.raises(AssertionError):
        check(view, plan)
    check(view, Plan(evict=[0, 1], admit=[3], reasons=dict.fromkeys(range(5), Reason.AHEAD), next_at=NOW + 1))
