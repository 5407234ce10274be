"""The book of streams: exact counts, ends, closes before and after arrival, replaced gateways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokenflow_engine.control.owners import Owner, Replaced
from tokenflow_engine.control.rids import name_parts, name_sample
from tokenflow_engine.control.streams import StreamBook
from tokenflow_engine.protocol import Reading

ME = Owner("gateway", "1")
OTHER = Owner("other", "1")


@pytest.fixture
def book() -> Iterator[StreamBook]:
    book = StreamBook()
    yield book
    book.check_integrity()


def last(book: StreamBook, rid: str) -> tuple[str, int]:
    """State and count that this gateway was told last; fails if it was told nothing."""
    states = [(u.state, u.generated) for u in book.take_updates(now=0.0) if u.rid == rid]
    return states[-1]


def confirmations(book: StreamBook) -> list[tuple[str, int, bool]]:
    return [(c.message.rid, c.message.generated, c.message.was_live) for c in book.take_confirmations()]


def test_a_stream_is_counted_to_its_end(book: StreamBook):
    book.opened("a", owner=ME, now=0.0)
    assert book.take_updates(now=0.0) == []  # nothing is known yet
    assert book.arrived("a", now=0.1)
    assert last(book, "a") == ("waiting", 0)
    book.counted("a", 1)
    assert book.has_urgent_updates
    assert last(book, "a") == ("running", 1)
    book.counted("a", 5)
    assert not book.has_urgent_updates
    assert last(book, "a") == ("running", 5)
    book.ended("a", aborted=False, now=1.0)
    assert last(book, "a") == ("finished", 5)
    assert book.generated_total == 5


def test_a_stream_opened_after_its_request_is_told_what_it_missed(book: StreamBook):
    book.arrived("a", now=0.0)
    book.counted("a", 3)
    assert book.take_updates(now=0.0) == []
    book.opened("a", owner=ME, now=0.2)
    assert last(book, "a") == ("running", 3)


def test_a_finished_stream_is_repeated_to_a_gateway_that_comes_back(book: StreamBook):
    book.opened("a", owner=ME, now=0.0)
    book.arrived("a", now=0.0)
    book.counted("a", 3)
    book.ended("a", aborted=False, now=0.1)
    book.take_updates(now=0.0)
    book.opened("a", owner=ME, now=30.0)
    assert last(book, "a") == ("finished", 3)


def test_parallel_samples_sum_up_and_end_together(book: StreamBook):
    """The cache-filling run before the samples neither counts nor ends the stream."""
    part, _ = name_parts("a", total=2)
    warm_up, first, second = (name_sample(part, unique=digit * 16) for digit in "abc")
    book.opened("a", owner=ME, now=0.0)
    book.arrived(warm_up, is_warm_up=True, now=0.0)
    book.ended(warm_up, aborted=False, now=0.1)
    assert last(book, "a") == ("waiting", 0)
    for sample in (first, second):
        book.arrived(sample, now=0.2)
        book.counted(sample, 4)
    assert last(book, "a") == ("running", 8)
    book.ended(first, aborted=False, now=0.3)
    assert last(book, "a") == ("running", 8)
    book.ended(second, aborted=False, now=0.4)
    assert last(book, "a") == ("finished", 8)


def test_a_batch_is_not_over_while_a_part_has_not_arrived(book: StreamBook):
    first, second = name_parts("a", total=2)
    book.opened("a", owner=ME, now=0.0)
    book.arrived(first, now=0.0)
    book.counted(first, 1)
    book.ended(first, aborted=False, now=0.1)
    assert last(book, "a") == ("waiting", 1)
    book.arrived(second, now=0.2)
    book.ended(second, aborted=False, now=0.3)
    assert last(book, "a") == ("finished", 1)


def test_retraction_is_a_state_and_loses_no_count(book: StreamBook):
    book.opened("a", owner=ME, now=0.0)
    book.arrived("a", now=0.0)
    book.counted("a", 7)
    book.moved("a", "waiting")
    assert last(book, "a") == ("waiting", 7)


def test_a_close_is_confirmed_only_when_the_engine_holds_nothing_more(book: StreamBook):
    book.opened("a", owner=ME, now=0.0)
    book.arrived("a", now=0.0)
    book.counted("a", 2)
    assert book.closed("a", owner=ME, now=1.0) == ["a"]
    book.reconcile({"a"}, now=1.1)
    assert confirmations(book) == []
    book.counted("a", 3)  # the step in flight
    book.ended("a", aborted=True, now=1.2)
    book.reconcile({"a"}, now=1.2)  # ended, but still in a batch
    assert confirmations(book) == []
    book.reconcile(set(), now=1.3)
    assert confirmations(book) == [("a", 3, True)]
    assert not book.is_closing


def test_closing_a_finished_stream_aborts_nothing(book: StreamBook):
    book.opened("a", owner=ME, now=0.0)
    book.arrived("a", now=0.0)
    book.counted("a", 2)
    book.ended("a", aborted=False, now=0.5)
    assert book.closed("a", owner=ME, now=1.0) == []
    book.reconcile(set(), now=1.0)
    assert confirmations(book) == [("a", 2, False)]
    assert book.statistics()["tombstones"] == 0


def test_a_request_that_comes_after_its_close_is_aborted_and_that_is_confirmed_too(book: StreamBook):
    book.opened("a", owner=ME, now=0.0)
    assert book.closed("a", owner=ME, now=0.1) == []
    book.reconcile(set(), now=0.1)
    assert confirmations(book) == [("a", 0, False)]
    assert not book.arrived("a", now=5.0)
    book.reconcile({"a"}, now=5.1)
    assert confirmations(book) == []
    book.reconcile(set(), now=5.2)
    assert confirmations(book) == [("a", 0, True)]


def test_parts_that_come_after_the_close_are_aborted(book: StreamBook):
    first, second = name_parts("a", total=2)
    book.opened("a", owner=ME, now=0.0)
    assert book.arrived(first, now=0.0)
    assert book.closed("a", owner=ME, now=0.1) == [first]
    assert not book.arrived(second, now=0.2)


def test_a_tombstone_lasts_a_minute_and_is_lifted_by_a_new_open(book: StreamBook):
    book.closed("a", owner=ME, now=0.0)
    book.closed("b", owner=ME, now=0.0)
    book.reconcile(set(), now=0.0)
    book.opened("b", owner=ME, now=1.0)
    assert book.arrived("b", now=2.0)
    assert book.arrived("a", now=61.0)


def test_what_vanishes_without_a_word_is_found_by_comparison(book: StreamBook):
    book.opened("a", owner=ME, now=0.0)
    book.arrived("a", now=0.0)
    book.reconcile(set(), now=0.5)
    assert last(book, "a") == ("aborted", 0)


def test_a_process_that_is_gone_ends_its_own_streams_only(book: StreamBook):
    for rid, owner in (("old", ME), ("done", ME), ("foreign", OTHER), ("new", Owner("gateway", "2"))):
        book.opened(rid, owner=owner, now=0.0)
        book.arrived(rid, now=0.0)
    book.ended("done", aborted=False, now=0.5)
    book.opened("unborn", owner=ME, now=0.5)
    book.opened("draining", owner=Owner("gateway", "0"), now=0.0)
    book.arrived("draining", now=0.0)
    assert book.replaced(Replaced("gateway", ("1",)), now=1.0) == ["old"]
    assert not book.arrived("unborn", now=1.5)


def test_nobody_is_told_about_streams_that_no_gateway_opened(book: StreamBook):
    book.arrived("direct", now=0.0)
    book.counted("direct", 9)
    book.ended("direct", aborted=False, now=0.1)
    assert book.take_updates(now=0.0) == []
    assert book.generated_total == 9


def test_an_id_used_again_after_its_end_starts_from_zero(book: StreamBook):
    for now in (0.0, 1.0):
        book.opened("a", owner=ME, now=now)
        book.arrived("a", now=now)
        book.counted("a", 2)
        book.ended("a", aborted=False, now=now + 0.5)
        assert last(book, "a") == ("finished", 2)


def test_nothing_grows_without_bound(book: StreamBook):
    for i in range(20_000):
        rid = f"r{i}"
        now = i / 100
        book.opened(rid, owner=ME, now=now)
        if i % 3:
            book.arrived(rid, now=now)
        if i % 3 == 1:
            book.ended(rid, aborted=False, now=now)
        book.closed(rid, owner=ME, now=now)
        book.reconcile(set(), now=now)
        book.forget_old(now)
    book.take_updates(now=0.0)
    assert len(book.take_confirmations()) == 20_000
    sizes = book.statistics()
    assert sizes["parts"] == sizes["closing"] == 0
    assert sizes["streams"] <= 6_001
    assert sizes["over"] <= 6_001
    assert sizes["tombstones"] <= 4_096


def test_a_batch_of_which_a_part_never_arrives_is_forgotten(book: StreamBook):
    for i in range(1000):
        first, _ = name_parts(f"r{i}", total=2)
        book.opened(f"r{i}", owner=ME, now=0.0)
        book.arrived(first, now=0.0)
        book.ended(first, aborted=False, now=1.0)
    book.forget_old(60.0)
    assert book.statistics()["streams"] == 1000
    book.forget_old(61.0)
    assert (book.statistics()["streams"], book.statistics()["over"]) == (0, 0)


def reading(rid: str, consumed: float, *, at: float, paused: bool = False) -> Reading:
    return Reading(rid=rid, at=at, consumed=consumed, rate=10.0, rate_low=8.0, rate_high=12.0, paused=paused)


def buffered(book: StreamBook, rid: str, *, now: float) -> float | None:
    """What this gateway is told of the reader's buffer when one more token has come."""
    book.counted(rid, 100)
    (told,) = [update.buffered for update in book.take_updates(now=now) if update.rid == rid]
    return told


def test_the_buffer_follows_the_declared_rate_and_the_reports(book: StreamBook):
    book.opened("a", owner=ME, now=0.0, declared_rate=4.0)
    book.arrived("a", now=0.0)
    book.counted("a", 50)
    book.take_updates(now=0.0)
    assert buffered(book, "a", now=5.0) == 80.0
    book.consumed(reading("a", 30.0, at=6.0), owner=ME, now=6.0)
    assert buffered(book, "a", now=7.0) == 60.0
    book.consumed(reading("a", 40.0, at=8.0, paused=True), owner=ME, now=8.0)
    assert buffered(book, "a", now=99.0) == 60.0


def test_reports_on_streams_of_others_change_nothing(book: StreamBook):
    book.opened("a", owner=ME, now=0.0, declared_rate=4.0)
    book.arrived("a", now=0.0)
    book.counted("a", 50)
    book.consumed(reading("a", 50.0, at=1.0), owner=OTHER, now=1.0)
    book.consumed(reading("unknown", 50.0, at=1.0), owner=ME, now=1.0)
    assert buffered(book, "a", now=0.0) == 100.0


def test_when_the_gateway_is_lost_its_readers_read_on_at_their_declared_rate(book: StreamBook):
    book.opened("a", owner=ME, now=0.0, declared_rate=4.0)
    book.arrived("a", now=0.0)
    book.counted("a", 100)
    book.consumed(reading("a", 0.0, at=0.0, paused=True), owner=ME, now=0.0)
    assert buffered(book, "a", now=10.0) == 100.0
    book.lost(ME, now=10.0)
    assert buffered(book, "a", now=15.0) == 80.0


def test_a_stream_that_no_gateway_opened_has_no_reader(book: StreamBook):
    book.arrived("a", now=0.0)
    book.consumed(reading("a", 1.0, at=0.0), owner=ME, now=0.0)
    assert book.take_updates(now=0.0) == []
