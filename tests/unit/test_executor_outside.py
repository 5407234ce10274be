"""Stalls that preemption causes: who ran dry while out of the batch, for how long, and why they were out."""

from __future__ import annotations

import pytest

from support.tables import READER
from tokenflow_engine.buffer import VirtualBuffer
from tokenflow_engine.control.streams import ReaderView
from tokenflow_engine.protocol import Reading
from tokenflow_engine.sglang.outside import Outside


class Readers:
    """Each with the buffer that the engine keeps of it."""

    def __init__(self) -> None:
        self.buffers: dict[str, VirtualBuffer] = {}
        self.machines: set[str] = set()
        self.reasons: dict[str, str] = {}

    def add(self, rid: str, *, unread: int, rate: float = 10.0, reason: str = "ahead") -> None:
        self.buffers[rid] = buffer = VirtualBuffer(rate=rate, now=0.0)
        buffer.generate(unread, now=0.0)
        self.reasons[rid] = reason

    def outside(self) -> Outside:
        return Outside(self.view, self.reasons.get)

    def view(self, rid: str, now: float) -> ReaderView:
        buffer = self.buffers[rid]
        return READER._replace(
            buffered=buffer.buffered_at(now),
            rate=buffer.rate,
            paused=buffer.paused,
            machine=rid in self.machines,
        )


def test_a_reader_who_runs_dry_outside_is_a_stall_until_the_stream_is_back():
    """20 tokens at 10 a second: dry at 2, back at 3."""
    readers = Readers()
    readers.add("a", unread=20)
    outside = readers.outside()
    outside.left("a", 0.0)
    outside.look(1.9)
    assert outside.stalls == {}
    outside.look(2.3)
    outside.look(2.6)
    assert outside.stall_s["ahead"] == pytest.approx(0.6)
    outside.back("a", 3.0)
    outside.look(9.0)
    assert (outside.stalls, outside.departures) == ({"ahead": 1}, {"ahead": 1})
    assert outside.stall_s["ahead"] == pytest.approx(1.0)


def test_a_stream_that_is_back_in_time_causes_none():
    readers = Readers()
    readers.add("a", unread=20)
    outside = readers.outside()
    outside.left("a", 0.0)
    outside.back("a", 1.9)
    outside.look(9.0)
    assert outside.departures == {"ahead": 1}
    assert outside.stalls == {}


def test_a_stall_between_two_looks_is_found_on_the_way_back():
    readers = Readers()
    readers.add("a", unread=20, reason="memory")
    outside = readers.outside()
    outside.left("a", 0.0)
    outside.look(1.95)
    outside.back("a", 2.05)
    assert outside.stalls == {"memory": 1}
    assert outside.stall_s["memory"] == pytest.approx(0.05)


def test_a_reader_who_pauses_waits_for_nothing_until_they_read_on():
    """20 tokens: 10 read in a second, a pause until 10, dry at 11, back at 11.5."""
    readers = Readers()
    readers.add("a", unread=20, reason="paused")
    outside = readers.outside()
    outside.left("a", 0.0)
    told = Reading(
        rid="a", at=1.0, consumed=10.0, rate=10.0, rate_low=10.0, rate_high=10.0, paused=True, seq=1
    )
    readers.buffers["a"].report(told, now=1.0)
    for tenth in range(20, 100):
        outside.look(tenth / 10)
    assert outside.stalls == {}
    back = Reading(rid="a", at=10.0, consumed=10.0, rate=10.0, rate_low=10.0, rate_high=10.0, seq=2)
    readers.buffers["a"].report(back, now=10.0)
    for tenth in range(100, 115):
        outside.look(tenth / 10)
    outside.back("a", 11.5)
    assert outside.stalls == {"paused": 1}
    assert outside.stall_s["paused"] == pytest.approx(0.5, abs=1e-6)


def test_a_report_ends_a_stall_that_was_none():
    """Thought to be dry at 2; a report at 2.5 says that 5 tokens are unread: dry at 3, then."""
    readers = Readers()
    readers.add("a", unread=20)
    outside = readers.outside()
    outside.left("a", 0.0)
    outside.look(2.1)
    slow = Reading(rid="a", at=2.5, consumed=15.0, rate=10.0, rate_low=10.0, rate_high=10.0, seq=1)
    readers.buffers["a"].report(slow, now=2.5)
    outside.look(2.6)
    outside.look(2.9)
    assert outside.stall_s["ahead"] == pytest.approx(0.1)
    outside.look(3.2)
    assert outside.stalls == {"ahead": 2}
    assert outside.stall_s["ahead"] == pytest.approx(0.3)


def test_nobody_waits_for_a_machines_stream():
    readers = Readers()
    readers.add("a", unread=0)
    readers.machines.add("a")
    outside = readers.outside()
    outside.left("a", 0.0)
    outside.look(5.0)
    outside.back("a", 9.0)
    assert outside.stalls == {}
    assert outside.departures == {"ahead": 1}


def test_a_stream_that_goes_further_out_left_once():
    readers = Readers()
    readers.add("a", unread=5)
    outside = readers.outside()
    outside.left("a", 0.0)
    readers.reasons["a"] = "memory"
    outside.left("a", 0.2)
    outside.look(1.0)
    assert outside.departures == {"ahead": 1}
    assert outside.stalls == {"memory": 1}  # the reason for which it is outside when its reader runs dry


def test_a_stream_that_vanished_is_forgotten():
    readers = Readers()
    readers.add("a", unread=0)
    outside = readers.outside()
    outside.left("a", 0.0)
    outside.look(1.0)
    outside.reconcile({"b"})
    outside.look(5.0)
    assert outside.stall_s["ahead"] == pytest.approx(1.0)


def test_a_slow_reader_is_looked_at_now_and_then():
    """A token in a thousand seconds: dry then, and not when they were last looked at."""
    readers = Readers()
    readers.add("a", unread=1, rate=0.001)
    outside = readers.outside()
    outside.left("a", 0.0)
    for minute in range(1, 17):
        outside.look(60.0 * minute)
    assert outside.stalls == {}
    outside.back("a", 1010.0)
    assert outside.stalls == {"ahead": 1}
    assert outside.stall_s["ahead"] == pytest.approx(10.0, abs=1.5)
