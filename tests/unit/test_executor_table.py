"""The table behind an `EngineView`: rows come and go, columns stay in order of arrival."""

from __future__ import annotations

import pytest

from support.tables import arrive, new_table, view_of
from tokenflow_engine.policy.base import Phase, Reason


def test_a_request_from_arrival_to_its_end():
    table = new_table()
    arrive(table, "a")
    view, ids = view_of(table)
    assert ids == ["a"]
    assert (view.phase[0], view.prefill[0], view.context[0], view.owned[0]) == (Phase.WAITING, 10, 10, 0)
    table.moved("a", Phase.PREFILLING, now=2.0)
    assert view_of(table)[0].prefill[0] == 6  # the request has 4 of its 10
    table.moved("a", Phase.RUNNING, now=3.0)
    table.counted("a", 5)
    view, _ = view_of(table)
    assert (view.prefill[0], view.context[0], view.generated[0], view.max_output[0]) == (0, 15, 5, 50)
    assert (view.owned[0], view.synced[0]) == (48, 48)  # never more synced than owned
    assert (view.since[0], view.preemptions[0], view.buffered[0], view.weight[0]) == (3.0, 0, 3.0, 2.0)
    table.ended("a", is_complete=True)
    view, ids = view_of(table)
    assert (len(view), ids) == (0, [])
    assert view.mean_output < 256


def test_a_departure_counts_as_one_preemption_however_far_it_goes():
    table = new_table()
    arrive(table, "a")
    for phase in (Phase.RUNNING, Phase.PARKED, Phase.OFFLOADED, Phase.LOADING, Phase.RUNNING, Phase.PARKED):
        assert table.moved("a", phase, now=4.0)
    assert not table.moved("a", Phase.PARKED, now=5.0)
    assert view_of(table)[0].preemptions[0] == 2
    assert view_of(table)[0].since[0] == 4.0


def test_reasons_are_told_once():
    table = new_table()
    arrive(table, "a", "b")
    assert table.explain({"a": Reason.NO_ROOM, "unknown": Reason.URGENT}) == ["a"]
    assert table.explain({"a": Reason.NO_ROOM}) == []
    assert (table.reason("a"), table.reason("b")) == (Reason.NO_ROOM, None)


def test_what_the_engine_no_longer_holds_goes():
    table = new_table()
    arrive(table, "a", "b", "c")
    table.reconcile({"b"})
    assert view_of(table)[1] == ["b"]


def test_what_may_not_be_preempted_is_marked():
    table = new_table(parkable=False)
    arrive(table, "a")
    assert not view_of(table)[0].may_park[0]


@pytest.mark.parametrize("kept", [1, 700])
def test_many_come_and_go_and_the_rest_stays_in_order_and_whole(kept: int):
    table = new_table()
    rids = [f"r{i}" for i in range(1500)]
    for i, rid in enumerate(rids):
        table.arrived(rid, prompt=i, max_output=9, now=float(i))
    for rid in rids[:-kept]:
        table.ended(rid, is_complete=False)
    late = [f"late{i}" for i in range(10)]
    for i, rid in enumerate(late):
        table.arrived(rid, prompt=i, max_output=9, now=2000.0 + i)
        table.moved(rid, Phase.RUNNING, now=2000.0)
    view, ids = view_of(table)
    assert ids == rids[-kept:] + late
    assert view.context.tolist() == [*range(1500 - kept, 1500), *range(10)]
    assert view.arrived.tolist() == sorted(view.arrived.tolist())
    assert [table.phase(rid) for rid in (ids[0], "late3")] == [Phase.WAITING, Phase.RUNNING]
    assert len(table) == kept + 10
