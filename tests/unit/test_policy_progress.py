"""No policy leaves an engine idle for ever, and none lets short streams starve a long one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.plans import Row, check, names, view_of
from support.worlds import World
from tokenflow_bench.costs import MACHINES
from tokenflow_bench.simulator import simulate
from tokenflow_bench.workload import Workload
from tokenflow_engine.policy.base import EngineView, Phase, Plan, Policy, Reason
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.registry import POLICIES, policy_named
from tokenflow_engine.policy.room import free_memory, wake
from tokenflow_engine.policy.rows import lowest_first
from tokenflow_engine.policy.turns import Turns

RUNNING, PARKED, OFFLOADED, WAITING = Phase.RUNNING, Phase.PARKED, Phase.OFFLOADED, Phase.WAITING

all_policies = pytest.mark.parametrize("name", list(POLICIES))


@all_policies
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_from_any_state_all_finish(name: str, seed: int) -> None:
    """As after a change of policy. `World.run` raises if nothing runs for a minute with streams there."""
    World.random(seed).run(policy_named(name))


def test_an_idle_world_is_noticed() -> None:
    """Negative control."""

    class Idle:
        name = "idle"

        def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
            return Plan(why_waiting=Reason.NO_ROOM, next_at=view.now + 1.0)

    with pytest.raises(AssertionError, match="idle"):
        World.random(1).run(Idle())


def _idle() -> dict[str, EngineView]:
    parked = [Row(phase=PARKED, context=400, buffered=50.0, since=5.0) for _ in range(3)]
    return {
        "memory": view_of(Row(phase=OFFLOADED, context=300, since=5.0), *parked, free=100),
        "no memory": view_of(Row(phase=OFFLOADED, context=300, since=5.0), *parked, free=0),
        "rows": view_of(Row(phase=OFFLOADED), *parked, free=1000, max_running=3, max_resident=3),
        "paused": view_of(
            Row(phase=OFFLOADED, context=700, paused=True, weight=4.0),
            *[Row(phase=PARKED, context=400, buffered=50.0, paused=True) for _ in range(3)],
            free=300,
        ),
        "the last tokens of a long one": view_of(
            Row(phase=OFFLOADED, context=998), free=1008, kv_tokens=1000
        ),
    }


@all_policies
@pytest.mark.parametrize("view", _idle().values(), ids=_idle().keys())
def test_an_idle_engine_gets_something_to_do(name: str, view: EngineView) -> None:
    plan = policy_named(name).plan(view, names(view))
    check(view, plan)
    assert plan.resume or plan.load or plan.admit


@pytest.mark.parametrize("name", ["fcfs", "andes", "tokenflow"])
def test_it_would_be_left_idle_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    module = importlib.import_module(f"tokenflow_engine.policy.{name}")
    monkeypatch.setattr(module, "wake", lambda draft, order: draft)
    view = _idle()["no memory"]
    plan = policy_named(name).plan(view, names(view))
    assert [*plan.evict, *plan.resume, *plan.load, *plan.admit] == []


def test_to_wake_costs_as_little_as_possible() -> None:
    view = _idle()["no memory"]
    plan = wake(Draft(view), np.array([1, 2, 3, 0])).plan
    assert (plan.evict, len(plan.resume), plan.load) == ([3], 1, [])


def test_nobody_is_woken_while_copies_are_under_way_or_somebody_runs() -> None:
    view = _idle()["no memory"]
    for busy in (
        replace(view, kv_freeing=400),
        replace(view, phase=np.array([OFFLOADED, PARKED, PARKED, Phase.LOADING], dtype=np.int8)),
    ):
        draft = Draft(busy)
        assert wake(draft, np.arange(3)) is draft


def test_parked_streams_leave_before_running_ones_do() -> None:
    view = view_of(*[Row(phase=RUNNING) for _ in range(8)], Row(phase=PARKED), free=0)
    draft = Draft(view)
    free_memory(draft, lowest_first(np.zeros(9)))
    assert draft.plan.evict == [8]
    for name in ("andes", "tokenflow"):
        newcomer = view_of(
            *[Row(phase=RUNNING) for _ in range(8)], Row(phase=PARKED), Row(phase=WAITING), free=0
        )
        assert policy_named(name).plan(newcomer, names(newcomer)).evict[0] == 8


def test_the_last_in_the_batch_stays_while_it_can_take_a_step() -> None:
    view = view_of(Row(phase=RUNNING, context=998), free=1, machine=MACHINES["4090"])
    draft = Draft(view, steps=4)
    free_memory(draft, lowest_first(np.zeros(1)))
    assert (draft.soon < 0, draft.plan.evict) == (True, [])
    draft = Draft(replace(view, kv_free=-100), steps=4)
    free_memory(draft, lowest_first(np.zeros(1)))
    assert draft.plan.evict == [0]


@pytest.mark.parametrize("name", ["andes", "tokenflow"])
@pytest.mark.parametrize("seed", range(8))
def test_memory_that_is_owed_is_given_back(name: str, seed: int) -> None:
    """The engine has promised more than there is: whoever may go goes until that is made good."""
    world = World.random(seed)
    view = replace(world.view(), kv_free=-100)
    check(view, policy_named(name).plan(view, names(view)))


def test_a_turn_is_kept_free_until_there_is_room() -> None:
    fixed = Row(phase=RUNNING, context=300, may_park=False)
    view = view_of(fixed, fixed, Row(phase=OFFLOADED, context=500), Row(phase=WAITING, context=60), free=100)
    turns, draft = Turns(after_s=30.0, stay_s=2.0), Draft(view)
    assert turns.next(replace(view, since=view.now - np.full(4, 29.0))) is None
    assert turns.next(view) == 2
    assert not turns.give(draft, 2, np.zeros(4))
    assert not draft.bring(3, Reason.ADMITTED)


def test_who_came_late_stays_for_a_while() -> None:
    view = view_of(
        Row(phase=RUNNING, since=1.0), Row(phase=RUNNING, since=3.0), Row(phase=RUNNING, waited=9.0)
    )
    assert Turns(after_s=30.0, stay_s=2.0).stays(view).tolist() == [True, False, False]


LONG_AT_S, LATEST_S = 5.0, 45.0


@all_policies
@pytest.mark.parametrize("machine", [False, True], ids=["reader", "machine"])
@pytest.mark.parametrize("per_s", [12.0, 15.0])
def test_a_long_stream_starts_among_short_ones_that_keep_coming(
    name: str, per_s: float, machine: bool
) -> None:
    """A prompt of three quarters of the pool, near and beyond capacity: it starts within 40 s."""
    assert _long_starts_at(policy_named(name), per_s, machine=machine) <= LATEST_S


@pytest.mark.parametrize(("name", "machine"), [("andes", False), ("tokenflow", True)])
def test_it_would_starve_otherwise(name: str, machine: bool) -> None:
    """Negative control."""
    without_turns = policy_named(name, starving_s=1e9)
    assert _long_starts_at(without_turns, 12.0, machine=machine) > LATEST_S


def _long_starts_at(policy: Policy, per_s: float, *, machine: bool) -> float:
    rng = np.random.default_rng(1)
    count = int(per_s * 60)
    arrived = np.append(np.cumsum(rng.exponential(1 / per_s, count)), LONG_AT_S)
    order = np.argsort(arrived, kind="stable")
    long = int(np.flatnonzero(order == count)[0])
    workload = Workload.of(
        arrived[order],
        np.append(rng.integers(60, 120, count), 1500)[order],
        np.append(rng.integers(30, 120, count), 40)[order],
        np.full(count + 1, 8.0),
    )
    is_long = np.arange(count + 1) == long
    workload = replace(workload, machine=is_long & machine)
    tiny = replace(MACHINES["laptop-tiny"], kv_tokens=2000, max_running=16)
    outcome = simulate(tiny, workload, policy, until_s=60.0)
    if not outcome.streams.generated[long]:
        return float("inf")
    return float(outcome.streams.token_s(long)[0])
