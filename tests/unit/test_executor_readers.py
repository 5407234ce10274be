"""What the book of streams tells a policy about readers, and gateways about parked streams."""

from __future__ import annotations

from tokenflow_engine.buffer import DEFAULT_RATE
from tokenflow_engine.control.owners import Owner
from tokenflow_engine.control.streams import StreamBook
from tokenflow_engine.protocol import Reading, StreamOpened

OWNER = Owner("gateway", "1")


def opened_book(**fields: object) -> StreamBook:
    book = StreamBook()
    opening = StreamOpened(rid="a", at=0.0, **fields)  # type: ignore[arg-type]
    book.opened("a", owner=OWNER, now=0.0, declared_rate=opening.declared_rate, opening=opening)
    return book


def test_a_request_that_no_gateway_opened_is_read_by_a_machine():
    book = StreamBook()
    book.arrived("a", now=0.0)
    book.counted("a", 50)
    reader = book.reader("a", 1.0)
    assert (reader.machine, reader.buffered, reader.rate) == (True, 0.0, DEFAULT_RATE)


def test_a_reader_with_its_class_and_its_buffer():
    book = opened_book(weight=3.0, ttft_s=0.4, may_park=False, declared_rate=10.0)
    book.arrived("a", now=0.0)
    book.counted("a", 50)
    reader = book.reader("a", 2.0)
    assert (reader.machine, reader.weight, reader.ttft_s, reader.may_park) == (False, 3.0, 0.4, False)
    assert (reader.rate, reader.rate_low, reader.rate_high) == (10.0, 10.0, 10.0)
    reading = Reading(rid="a", at=2.0, consumed=8.0, rate=4.0, rate_low=3.0, rate_high=6.0, paused=True)
    book.consumed(reading, owner=OWNER, now=2.0)
    reader = book.reader("a", 10.0)
    assert (reader.buffered, reader.paused) == (42.0, True)
    assert (reader.rate, reader.rate_low, reader.rate_high) == (4.0, 3.0, 6.0)
    book.lost(OWNER, now=11.0)
    reader = book.reader("a", 11.0)
    assert (reader.rate_low, reader.rate, reader.rate_high, reader.paused) == (10.0, 10.0, 10.0, False)


def test_requests_of_one_stream_share_its_reader():
    book = opened_book(declared_rate=6.0)
    for part in ("a_0of2", "a_1of2"):
        book.arrived(part, now=0.0)
        book.counted(part, 10)
    reader = book.reader("a_0of2", 0.0)
    assert (reader.buffered, reader.rate) == (10.0, 3.0)


def test_agents_are_machines_though_a_gateway_opened_them():
    book = opened_book(reader="machine")
    book.arrived("a", now=0.0)
    assert book.reader("a", 0.0).machine


def test_the_last_token_of_a_parked_stream_does_not_make_it_run():
    book = opened_book()
    book.arrived("a", now=0.0)
    book.counted("a", 5)
    book.moved("a", "parked")
    book.counted("a", 6)
    [update] = book.take_updates(now=1.0, reason={"a": "ahead"}.get)
    assert (update.state, update.generated, update.reason) == ("parked", 6, "ahead")
    book.moved("a", "running")
    [update] = book.take_updates(now=1.0, reason={"a": "ahead"}.get)
    assert (update.state, update.reason) == ("running", None)


def test_a_stream_runs_while_any_of_its_requests_does():
    book = opened_book()
    for part, state in (("a_0of2", "parked"), ("a_1of2", "running")):
        book.arrived(part, now=0.0)
        book.moved(part, state)  # type: ignore[arg-type]
    assert [update.state for update in book.take_updates(now=0.0)] == ["running"]
    book.moved("a_1of2", "waiting")
    assert [update.state for update in book.take_updates(now=0.0)] == ["parked"]


def test_a_stream_is_off_the_device_while_its_request_is():
    book = opened_book()
    book.arrived("a", now=0.0)
    seen = []
    for state, offloaded in (("running", False), ("parked", False), ("parked", True), ("running", False)):
        book.moved("a", state, offloaded=offloaded)  # type: ignore[arg-type]
        seen += [(update.state, update.offloaded) for update in book.take_updates(now=0.0)]
    assert seen == [("running", False), ("parked", False), ("parked", True), ("running", False)]
