"""Who gives up its copy in host memory for whom: who is due back clearly later."""

from __future__ import annotations

import pytest

from support.plans import Row, names, view_of
from tokenflow_engine.control.orders import Orders
from tokenflow_engine.policy.base import Phase, Plan
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.due import due_back, gives_way


def away(**given: object) -> Row:
    return Row(phase=Phase.OFFLOADED, **given)  # type: ignore[arg-type]


def here(phase: Phase = Phase.RUNNING, **given: object) -> Row:
    return Row(phase=phase, **given)  # type: ignore[arg-type]


def test_the_longest_pause_first_then_who_has_most_to_read() -> None:
    rows = [
        away(buffered=50.0),
        away(paused=True, since=8.0),
        away(buffered=90.0),
        away(paused=True, since=30.0),
        away(machine=True, since=4.0),
    ]
    due = due_back(view_of(*rows, host_free=0), [])
    assert list(due) == [3, 1, 2, 4, 0]
    assert (due[0], due[2], due[4]) == (5.0, 9.0, 6.0)


def test_who_leaves_is_due_as_if_it_left_now() -> None:
    """However long it ran before; a parked one has been away since it was parked."""
    rows = [
        away(paused=True, since=10.0),
        here(paused=True),
        here(Phase.PARKED, paused=True, since=20.0),
        here(machine=True),
        here(buffered=90.0),
    ]
    due = due_back(view_of(*rows, host_free=0), [1, 3])
    assert list(due) == [2, 0, 1, 3]
    assert due[3] == 10.0
    assert gives_way(due, 1) == [2, 0]
    assert gives_way(due, 2) == []


def test_a_lighter_class_gives_way_first() -> None:
    """Readers of a heavier one must have more to read, by as much as it weighs more; of paused ones, too."""
    rows = [
        away(buffered=80.0, weight=4.0),
        away(buffered=40.0, weight=2.0),
        away(paused=True, since=8.0, weight=2.0),
        away(paused=True, since=1.0, weight=4.0),
    ]
    due = due_back(view_of(*rows, host_free=0), [])
    assert list(due) == [2, 3, 0, 1]
    assert (due[0], due[1]) == (4.0, 4.0), "seconds of the lightest"
    others = [here(weight=0.25), here(Phase.WAITING, generated=0, weight=0.25)]
    assert due_back(view_of(*rows, *others, host_free=0), []) == due, "whoever else is there"


def test_there_is_no_list_while_all_that_is_on_the_device_has_room() -> None:
    rows = [away(paused=True), here()]
    view = view_of(*rows, host_free=0)
    assert due_back(view, [1])
    assert not due_back(view_of(*rows, host_free=view.kv_tokens), [1])
    assert not due_back(view_of(here(), here(Phase.PARKED), host_free=0), [0])


def test_only_who_is_clearly_later_gives_way() -> None:
    due = {"late": 9.0, "later": 7.5, "leaves": 6.0, "soon": 2.5, "dry": 0.0}
    assert gives_way(due, "leaves") == ["late"]
    assert gives_way(due, "soon") == ["late", "later", "leaves"]
    assert gives_way(due, "dry") == ["late", "later", "leaves"], "and nobody who is about to come back"
    assert gives_way(due, "unknown") == gives_way(due, "dry"), (
        "it leaves for memory: the plan wanted it to run"
    )


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.PARKED])
def test_plans_and_orders_say_when_streams_are_due(phase: Phase) -> None:
    view = view_of(away(paused=True), away(buffered=90.0), here(phase, buffered=40.0), host_free=0)
    draft = Draft(view)
    draft.evict(2, draft.plan.why_waiting)
    plan: Plan = draft.finish(next_at=view.now + 1)
    assert list(plan.due_s) == [0, 1, 2]
    orders = Orders.of(plan, names(view))
    assert orders.due_s["s2"] == 4.0
    assert gives_way(orders.due_s, "s2") == ["s0", "s1"]
