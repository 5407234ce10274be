"""The table behind an `EngineView`: rows come and go, columns stay in order of arrival."""

from __future__ import annotations

import random

import pytest

from support.tables import FakeRequest, arrive, new_table, view_of
from tokenflow_engine.control.owners import Owner
from tokenflow_engine.control.streams import StreamBook
from tokenflow_engine.policy.base import Phase, Plan, Reason
from tokenflow_engine.protocol import Reading, StreamOpened


def test_a_request_from_arrival_to_its_end():
    table = new_table()
    arrive(table, "a")
    view, ids = view_of(table)
    assert ids == ["a"]
    assert (view.phase[0], view.prefill[0], view.context[0], view.owned[0]) == (Phase.WAITING, 10, 10, 0)
    table.moved("a", Phase.PREFILLING, now=2.0)
    assert view_of(table)[0].prefill[0] == 6  # the request has 4 of its 10
    table.moved("a", Phase.RUNNING, now=3.0)
    table.counted("a", 45)
    view, _ = view_of(table, now=11.0)
    assert (view.prefill[0], view.context[0], view.generated[0], view.max_output[0]) == (0, 55, 45, 50)
    assert (view.owned[0], view.synced[0]) == (48, 48)  # whole pages less those it shares; no more synced
    assert (view.since[0], view.preemptions[0], view.weight[0]) == (3.0, 0, 2.0)
    table.ended("a")
    view, ids = view_of(table, now=12.0)
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
    view_of(table)
    assert table.planned(Plan(reasons={0: Reason.NO_ROOM})) == ["a"]
    assert table.planned(Plan(reasons={0: Reason.NO_ROOM})) == []
    assert (table.reason("a"), table.reason("b"), table.reason("unknown")) == (Reason.NO_ROOM, None, None)
    assert table.planned(Plan(reasons={0: Reason.ADMITTED}, why_waiting=Reason.OVERLOAD)) == ["a", "b"]
    assert (table.reason("a"), table.reason("b")) == (Reason.ADMITTED, Reason.OVERLOAD)


def test_readers_read_on_as_their_virtual_buffers_do():
    """Bursts of tokens, dry spells, a pause and a report: the same at each look, without asking the book."""
    dice = random.Random(5)  # noqa: S311 - a test's dice
    table, book = new_table(), StreamBook()
    owner = Owner("gateway", "1")
    opening = StreamOpened(rid="a", at=0.0, declared_rate=8.0)
    book.opened("a", owner=owner, now=0.0, declared_rate=8.0, opening=opening)
    book.arrived("a", now=0.0)
    arrive(table, "a")
    made, asked = 0, 0
    for step in range(400):
        now = 0.1 * step
        if dice.random() < 0.4:
            made += dice.choice([1, 1, 1, 12])
            book.counted("a", made)
            table.counted("a", made)
        if dice.random() < 0.05:
            reading = Reading(
                rid="a", at=now, consumed=0.5 * made, rate=dice.uniform(2.0, 12.0), rate_low=1.0,
                rate_high=20.0, paused=dice.random() < 0.3,
            )  # fmt: skip
            book.consumed(reading, owner=owner, now=now)
        for rid in book.take_changed_readers():
            table.read_by(rid, book.reader(rid, now), now=now)
            asked += 1
        view, _ = view_of(table, now=now)
        truth = book.reader("a", now)
        assert view.buffered[0] == pytest.approx(truth.buffered, abs=1e-6)
        assert (view.rate[0], view.paused[0]) == (truth.rate, truth.paused)
    assert 1 < asked < 60


def test_the_engine_is_asked_about_few_at_one_time_and_in_time_about_all():
    asked: list[str] = []

    def shared(req: FakeRequest) -> int:
        asked.append(req.rid)
        return 16

    table = new_table(shared_tokens=shared)
    rids = [f"r{i}" for i in range(200)]
    arrive(table, *rids)
    for rid in rids:
        table.moved(rid, Phase.RUNNING, now=1.0)
        table.counted(rid, 38)
    view, _ = view_of(table, now=2.0)
    assert (view.owned.min(), view.owned.max()) == (32, 38)  # not asked yet: all but the prompt
    assert len(asked) == 32  # as many as are due, and as many of whom nothing is known
    for look in range(1, 13):
        table.tend(2.0 + 0.035 * look)
        table.tend(2.001 + 0.035 * look)
        assert len(asked) <= 32 + 16 * look
    assert sorted(asked) == sorted(rids)  # nobody twice within half a second
    view, _ = view_of(table, now=3.0)
    assert (view.owned.min(), view.owned.max()) == (32, 32)
    asked.clear()
    table.planned(Plan(write=[7, 150]))
    view_of(table, now=3.035)
    assert {"r7", "r150"} <= set(asked)  # what is being written is looked at each time


def test_a_view_knows_the_memory_of_who_has_just_been_prefilled():
    """Else they share their whole prompt, nothing of them would be free, and more would have to go."""
    table = new_table()
    arrive(table, "a", "b")
    table.moved("a", Phase.RUNNING, now=1.0)
    table.counted("a", 38)
    assert view_of(table, now=2.0)[0].owned.tolist() == [32, 0]
    table.moved("b", Phase.RUNNING, now=2.005)
    table.counted("b", 38)
    assert view_of(table, now=2.01)[0].owned.tolist() == [32, 32]


def test_the_engine_is_asked_about_what_is_on_the_device_only():
    asked: list[str] = []

    def shared(req: FakeRequest) -> int:
        asked.append(req.rid)
        return 16

    table = new_table(shared_tokens=shared)
    arrive(table, "waits", "runs", "leaves", "ends")
    for rid in ("runs", "leaves", "ends"):
        table.moved(rid, Phase.RUNNING, now=1.0)
        table.counted(rid, 5)
    table.moved("leaves", Phase.OFFLOADED, now=1.0)
    table.ended("ends")
    view_of(table, now=2.0)
    assert asked == ["runs"]
    table.planned(Plan(write=[2]))  # it had left before the plan for that view came
    table.moved("leaves", Phase.LOADING, now=3.0)
    table.moved("leaves", Phase.WAITING, now=3.0)
    view_of(table, now=2.1)
    assert asked == ["runs"]
    table.moved("leaves", Phase.RUNNING, now=4.0)
    view_of(table, now=11.0)
    assert set(asked[1:]) == {"runs", "leaves"}


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
        table.ended(rid)
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
