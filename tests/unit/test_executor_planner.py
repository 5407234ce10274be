"""When plans are made, what becomes of them, and what a policy that fails costs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from support.tables import DEVICE, FlatCosts, SameReaders, arrive, new_table
from tokenflow_engine.control.orders import STOCK, Orders
from tokenflow_engine.policy.base import EngineView, Phase, Place, Plan, Policy, Reason
from tokenflow_engine.policy.chaos import Chaos
from tokenflow_engine.policy.fcfs import FCFS
from tokenflow_engine.policy.names import POLICY_NAMES
from tokenflow_engine.policy.registry import POLICIES
from tokenflow_engine.sglang.planner import Planner
from tokenflow_engine.sglang.table import Table


class Scripted:
    """Answers with the plans it is given."""

    name = "scripted"

    def __init__(self, *plans: Plan | Exception) -> None:
        self.plans = list(plans)

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        answer = self.plans.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Flaky:
    """Fails at these times."""

    name = "flaky"

    def __init__(self, bad: set[float]) -> None:
        self.bad = bad

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        if view.now in self.bad:
            raise RuntimeError("no")
        return Plan()


def new_planner(policy: Policy, table: Table | None = None) -> Planner:
    return Planner(
        policy,
        table=new_table() if table is None else table,
        costs=FlatCosts(),
        device=lambda: DEVICE,
        readers=SameReaders(),
    )


def populated() -> Table:
    """One in each place, named after it."""
    table = new_table()
    arrive(table, *(phase.name for phase in Phase))
    for phase in Phase:
        table.moved(phase.name, phase, now=1.0)
    return table


def row(phase: Phase) -> int:
    return list(Phase).index(phase)


def test_a_plan_becomes_orders_by_name():
    plan = Plan(
        park=[row(Phase.RUNNING)],
        resume=[row(Phase.PARKED)],
        load=[(row(Phase.OFFLOADED), Place.RECOMPUTE)],
        admit=[row(Phase.WAITING)],
        write=[row(Phase.RUNNING)],
        prefill_tokens=64,
        reasons={row(Phase.RUNNING): Reason.AHEAD},
    )
    planner = new_planner(Scripted(plan), populated())
    assert planner.orders(2.0) == Orders(
        park=["RUNNING"],
        resume=["PARKED"],
        load=[("OFFLOADED", 1)],
        admit=["WAITING"],
        write=["RUNNING"],
        prefill_tokens=64,
    )
    assert planner.news == ["RUNNING"]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(park=[row(Phase.WAITING)]),
        Plan(evict=[row(Phase.OFFLOADED)]),
        Plan(resume=[row(Phase.RUNNING)]),
        Plan(load=[(row(Phase.PARKED), Place.LOAD)]),
        Plan(admit=[row(Phase.PREFILLING)]),
        Plan(park=[row(Phase.RUNNING)], evict=[row(Phase.RUNNING)]),
        Plan(park=[99]),
    ],
)
def test_a_plan_that_the_view_does_not_allow_is_the_last_of_its_policy(plan: Plan):
    planner = new_planner(Scripted(plan), populated())
    assert planner.orders(2.0) == STOCK
    assert (planner.errors, planner.policy.name) == (1, "fcfs")


def _newcomer(planner: Planner, table: Table, rid: str, *, prompt: int = 7, now: float) -> None:
    arrive(table, rid)
    planner.arrived(rid, prompt=prompt, now=now)


def test_a_plan_is_put_off_for_the_first_token_of_who_comes_in_as_it_comes():
    """Planning takes time from it, and would change nothing."""
    table = new_table()
    planner = new_planner(Scripted(Plan(stock=True, next_prompt=10), Plan(stock=True)), table)
    assert planner.orders(1.0) == STOCK
    _newcomer(planner, table, "a", now=2.0)
    assert planner.orders(2.0) is None
    assert planner.orders(2.2) is None
    table.counted("a", 1)
    assert planner.orders(2.21) == STOCK


@pytest.mark.parametrize("next_prompt", [0, 6])
def test_who_is_longer_than_the_last_plan_allows_is_planned_for(next_prompt: int):
    table = new_table()
    planner = new_planner(Scripted(Plan(stock=True, next_prompt=next_prompt), Plan(admit=[0])), table)
    planner.orders(1.0)
    _newcomer(planner, table, "a", now=2.0)
    assert planner.orders(2.0) == Orders(admit=["a"])


def test_one_of_unknown_length_is_planned_for():
    """Given as embeddings, for example."""
    table = new_table()
    planner = new_planner(Scripted(Plan(stock=True, next_prompt=10), Plan(stock=True)), table)
    planner.orders(1.0)
    _newcomer(planner, table, "a", prompt=0, now=2.0)
    assert planner.orders(2.0) == STOCK


def test_only_one_comes_in_without_a_plan():
    table = new_table()
    planner = new_planner(Scripted(Plan(stock=True, next_prompt=10), Plan(admit=[1])), table)
    planner.orders(1.0)
    _newcomer(planner, table, "a", now=2.0)
    assert planner.orders(2.0) is None
    _newcomer(planner, table, "b", now=2.01)
    assert planner.orders(2.01) == Orders(admit=["b"])


def test_a_plan_is_not_put_off_for_long_nor_for_one_that_is_gone():
    for gone in (False, True):
        table = new_table()
        planner = new_planner(Scripted(Plan(stock=True, next_prompt=10), Plan(stock=True)), table)
        planner.orders(1.0)
        _newcomer(planner, table, "a", now=2.0)
        if gone:
            table.ended("a")
        assert planner.orders(2.0 if gone else 2.3) == STOCK


def test_a_policy_that_raises_is_suspended_and_tried_again_afresh():
    planner = new_planner(Scripted(RuntimeError("no"), Plan(), Plan()), populated())
    tries: list[float] = []
    for now in range(2, 40):
        errors = planner.errors
        planner.orders(float(now))
        if planner.errors > errors:
            tries.append(now)
            assert isinstance(planner.policy, FCFS)
            assert planner.suspended == "scripted"
    assert tries == [2, 3, 5, 9, 17, 33]  # each time the copy's first plan fails, as the first one's did
    planner.use(FCFS())
    assert planner.suspended is None


def test_a_policy_that_works_again_stays_and_may_fail_soon_again():
    planner = new_planner(Flaky(bad={2.0, 700.0}), populated())
    for now, suspended, name in (
        (2.0, "flaky", "fcfs"),
        (2.9, "flaky", "fcfs"),
        (3.0, None, "flaky"),
        (4.0, None, "flaky"),
        (700.0, "flaky", "fcfs"),
        (701.0, None, "flaky"),
    ):
        planner.note()
        planner.orders(now)
        assert (planner.suspended, planner.policy.name) == (suspended, name), now
    assert planner.errors == 2


def test_orders_that_could_not_be_carried_out_suspend_their_policy_too():
    planner = new_planner(Scripted(Plan(), Plan()), populated())
    assert planner.orders(2.0) is not None
    planner.failed(2.5)
    assert (planner.errors, planner.policy.name, planner.suspended) == (1, "fcfs", "scripted")
    assert planner.orders(2.6) is not None  # from the last resort
    planner.orders(3.5)
    assert (planner.policy.name, planner.suspended) == ("scripted", None)
    planner.use(FCFS())
    planner.failed(4.0)
    assert (planner.errors, planner.policy.name, planner.suspended) == (2, "fcfs", None)
    assert planner.orders(4.1) is not None


def test_what_fails_for_every_policy_is_not_tried_at_every_step():
    table = populated()
    planner = Planner(
        Scripted(Plan()), table=table, costs=FlatCosts(), device=lambda: 1 // 0, readers=SameReaders()
    )
    for step in range(1000):
        planner.note()
        assert planner.orders(2.0 + step / 100) in (None, STOCK)
    assert planner.errors < 10


def test_an_engine_that_cannot_be_asked_between_plans_costs_the_policy_alone():
    def shared(_req: object) -> int:
        if is_broken:
            raise RuntimeError("no")
        return 16

    is_broken = False
    table = new_table(shared_tokens=shared)
    arrive(table, "a", "b")
    table.moved("a", Phase.RUNNING, now=1.0)
    table.counted("a", 5)
    planner = new_planner(Scripted(Plan(), Plan()), table)
    assert planner.orders(2.0) is not None
    is_broken = True
    assert planner.orders(2.3) is None  # what was asked less than half a second ago is not asked again
    assert planner.orders(2.6) == STOCK
    assert (planner.errors, planner.suspended) == (1, "scripted")


def test_plans_are_made_on_events_and_when_they_run_out():
    policy = Scripted(Plan(next_at=9.0), Plan(), Plan())
    planner = new_planner(policy)
    assert planner.orders(1.0) is not None
    assert planner.orders(5.0) is None
    assert planner.orders(9.0) is not None  # it had run out
    assert planner.orders(99.0) is None  # nothing is waiting, and nothing happened
    planner.note()
    assert planner.orders(100.0) is not None
    assert planner.plans == sum(planner.times.message().counts) == 3


def test_while_anything_is_out_there_is_a_plan_at_least_every_second():
    planner = new_planner(Scripted(Plan(), Plan()), populated())
    assert planner.orders(1.0) is not None
    assert planner.orders(1.5) is None
    assert planner.orders(2.1) is not None


def test_the_stock_policy_is_asked_once():
    planner = new_planner(FCFS())
    assert planner.orders(1.0) == STOCK
    for now in range(2, 20):
        planner.note()
        assert planner.orders(float(now)) is None
    assert planner.plans == 1
    planner.use(FCFS())
    assert planner.orders(30.0) == STOCK


@pytest.mark.parametrize("name", [*POLICY_NAMES])
def test_every_policy_plans_for_every_phase(name: str):
    planner = new_planner(POLICIES[name](), populated())
    assert planner.orders(2.0) is not None
    assert planner.errors == 0


def test_chaos_plans_what_the_view_allows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOKENFLOW_CHAOS", "3")
    table = populated()
    for phase in Phase:
        table.counted(phase.name, 5)
    planner = new_planner(Chaos(), table)
    seen: set[str] = set()
    for now in range(2, 200):
        orders = planner.orders(float(now))
        assert orders is not None
        seen |= {kind for kind in ("park", "evict", "resume", "load", "write") if getattr(orders, kind)}
    assert seen == {"park", "evict", "resume", "load", "write"}
    assert planner.errors == 0


@pytest.mark.parametrize("seed", range(10))
def test_chaos_preempts_everybody_once_before_the_end_and_tells(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("TOKENFLOW_CHAOS", f"{seed}:park,evict")
    caplog.set_level(logging.INFO)
    table = populated()
    table.counted("RUNNING", 42)  # of 50
    planner = new_planner(Chaos(), table)
    orders = planner.orders(2.0)
    assert orders is not None
    assert "RUNNING" in [*orders.park, *orders.evict]
    table.moved("RUNNING", Phase.PARKED, now=2.0)
    planner.orders(3.0)
    assert caplog.text.count("chaos has preempted RUNNING 1 times") == 1


def test_the_names_are_those_of_the_policies():
    assert set(POLICY_NAMES) == set(POLICIES)
