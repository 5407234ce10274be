"""Offloaded KV over a backend of lists: what is synced, what may be reused, what happens when copies fail."""

from __future__ import annotations

import pytest

from support.memory_transfer import MemoryTransfer
from tokenflow_engine.kv.offload import Event, OffloadManager
from tokenflow_engine.kv.transfer.base import Direction

WRITE, LOAD = Direction.WRITE, Direction.LOAD
ROW = list(range(100, 164))


def manager(
    *, host_tokens: int = 64, page_tokens: int = 4, verify: bool = False, ordered: bool = False
) -> tuple[OffloadManager, MemoryTransfer]:
    transfer = MemoryTransfer(slots=256, host_tokens=host_tokens, ordered=ordered)
    transfer.device = [f"kv of slot {slot}" for slot in range(256)]
    return OffloadManager(transfer, page_tokens=page_tokens, verify=verify), transfer


def write(offload: OffloadManager, transfer: MemoryTransfer, rid: str, tokens: int) -> None:
    assert offload.write(rid, ROW, tokens, leaving=True) == tokens
    settle(offload, transfer)
    assert offload.synced(rid) == tokens


def settle(offload: OffloadManager, transfer: MemoryTransfer) -> list[tuple[str, Event]]:
    """Let everything that is queued happen; what was reported."""
    events = []
    for _ in range(40):
        offload.prepare_forward()
        transfer.finish_all()
        events += [(done.rid, done.event) for done in offload.poll()]
    offload.check_integrity()
    return events


def test_write_through_takes_whole_pages_within_the_budget() -> None:
    offload, transfer = manager()
    offload.begin_iteration(10)
    assert offload.write("a", ROW, 19) == 8
    assert offload.write("b", ROW, 19) == 0
    offload.begin_iteration(6)  # and the two that were left before
    assert offload.write("a", ROW, 19) == 8
    offload.begin_iteration(100)
    assert offload.write("a", ROW, 19) == 0
    assert offload.write("a", ROW, 19, leaving=True) == 3
    settle(offload, transfer)
    assert offload.synced("a") == 19


def test_part_of_a_page_is_completed_later() -> None:
    offload, transfer = manager()
    write(offload, transfer, "a", 6)
    assert offload.write("a", ROW, 9, leaving=True) == 3
    settle(offload, transfer)
    (run,) = offload.host_rows("a", 0, 9)
    assert transfer.host[run.row : run.row + 9] == [f"kv of slot {slot}" for slot in ROW[:9]]
    assert offload.statistics().host_used_tokens == 12


def test_streams_share_a_copy() -> None:
    offload, transfer = manager()
    offload.write("a", ROW, 3, leaving=True)
    offload.write("b", ROW[10:], 3, leaving=True)
    offload.prepare_forward()
    assert transfer.in_flight(WRITE) == 1


def test_no_more_than_lasts_a_while_is_at_the_backend() -> None:
    """What waits can still be taken back, and what is urgent does not wait behind it."""
    offload, transfer = manager()
    offload.write("a", ROW, 64, leaving=True)
    offload.prepare_forward()
    assert transfer.in_flight(WRITE) == 3  # 20 ms at a megabyte a second
    assert offload.evict_s(10) == pytest.approx(0.074)
    assert offload.budget_tokens(0.1) == 100 - 64
    offload.drop("a")
    transfer.finish_all()
    offload.poll()
    assert transfer.in_flight(WRITE) == 0
    assert offload.host_free == 64


def test_detach_waits_for_the_copies_that_read_the_slots() -> None:
    offload, transfer = manager()
    assert not offload.detach("a", 5)
    offload.write("a", ROW, 5, leaving=True)
    assert not offload.detach("a", 5)
    offload.prepare_forward()
    assert not offload.detach("a", 5)
    transfer.finish(WRITE)
    offload.poll()
    assert not offload.detach("a", 6)
    assert offload.detach("a", 5)
    assert offload.is_host_only("a")


def test_detach_with_fewer_tokens_waits_for_copies_of_the_others() -> None:
    """They read slots that are to be freed."""
    offload, transfer = manager()
    write(offload, transfer, "a", 8)
    offload.write("a", ROW, 30, leaving=True)
    assert not offload.detach("a", 8)
    settle(offload, transfer)
    assert offload.detach("a", 8)


def test_detach_is_at_once_where_later_work_comes_after_the_copy() -> None:
    offload, transfer = manager(ordered=True)
    offload.write("a", ROW, 5, leaving=True)
    assert not offload.detach("a", 5)
    offload.prepare_forward()
    assert offload.detach("a", 5)
    transfer.device[ROW[0]] = "another stream's"
    settle(offload, transfer)
    offload.load("a", 0, [7, 8, 9, 10, 11])
    settle(offload, transfer)
    assert transfer.device[7] == f"kv of slot {ROW[0]}"


def test_load_brings_back_what_was_written_and_keeps_the_copy() -> None:
    offload, transfer = manager()
    write(offload, transfer, "a", 21)
    assert offload.detach("a", 21)
    offload.load("a", 4, list(range(17)))
    assert offload.is_loading("a")
    assert settle(offload, transfer) == [("a", Event.LOADED)]
    assert transfer.device[:17] == [f"kv of slot {slot}" for slot in ROW[4:21]]
    assert offload.synced("a") == 21
    assert not offload.is_host_only("a")


def test_failed_write_counts_for_nothing_and_can_be_repeated() -> None:
    offload, transfer = manager()
    offload.write("a", ROW, 24, leaving=True)
    offload.prepare_forward()
    transfer.finish(WRITE)
    transfer.finish(WRITE, error="no")
    first = offload.poll()
    assert [done.event for done in first] == [Event.WRITTEN]
    assert offload.write("a", ROW, 30, leaving=True) == 0  # a copy behind the failed one is in flight
    transfer.finish(WRITE)
    (failed,) = offload.poll()
    assert (failed.event, failed.start, failed.tokens, failed.error) == (Event.WRITE_FAILED, 8, 16, "no")
    assert offload.synced("a") == 8
    assert not offload.detach("a", 24)
    assert offload.statistics().failed_writes == 1
    offload.check_integrity()
    assert offload.write("a", ROW, 24, leaving=True) == 16
    settle(offload, transfer)
    assert offload.synced("a") == 24


def test_failed_load_is_reported_once_nothing_touches_the_slots() -> None:
    offload, transfer = manager()
    write(offload, transfer, "a", 24)
    offload.load("a", 0, list(range(24)))
    offload.prepare_forward()
    transfer.finish(LOAD, error="no")
    assert offload.poll() == []
    transfer.finish_all()
    (failed,) = offload.poll()
    assert (failed.event, failed.start, failed.tokens) == (Event.LOAD_FAILED, 0, 24)
    assert offload.synced("a") == 24


@pytest.mark.parametrize("verify", [True, False])
def test_corrupt_copy_is_not_loaded(verify: bool) -> None:
    """Without verification it is: so the difference is made by it."""
    offload, transfer = manager(verify=verify)
    write(offload, transfer, "a", 24)
    (run,) = offload.host_rows("a", 13, 14)
    transfer.host[run.row] = "flipped"
    offload.load("a", 0, list(range(24)))
    events = settle(offload, transfer)
    assert events == [("a", Event.LOAD_FAILED if verify else Event.LOADED)]
    assert ("flipped" in transfer.device) is not verify
    assert offload.synced("a") == (13 if verify else 24)
    assert offload.statistics().corrupt_loads == verify


def test_dropped_stream_keeps_its_pages_until_no_copy_touches_them() -> None:
    offload, transfer = manager()
    offload.write("a", ROW, 8, leaving=True)
    offload.prepare_forward()
    assert offload.drop("a")
    assert offload.host_free == 56
    offload.write("a", ROW, 4, leaving=True)  # another stream of this name
    transfer.finish(WRITE)
    assert offload.poll() == []
    assert offload.host_free == 60
    assert settle(offload, transfer) == [("a", Event.WRITTEN)]


def test_slots_of_a_load_are_released_once_it_is_over() -> None:
    offload, transfer = manager()
    write(offload, transfer, "a", 24)
    offload.load("a", 0, list(range(24)))
    offload.prepare_forward()
    transfer.finish(LOAD)
    assert not offload.drop("a")
    assert offload.poll() == []
    assert settle(offload, transfer) == [("a", Event.RELEASED)]
    assert offload.host_free == 64


def test_load_that_has_not_begun_is_dropped_at_once() -> None:
    offload, transfer = manager()
    write(offload, transfer, "a", 8)
    offload.load("a", 0, list(range(8)))
    assert offload.drop("a")
    assert settle(offload, transfer) == []
    assert offload.host_free == 64


def test_full_pool_refuses_and_says_so() -> None:
    offload, transfer = manager(host_tokens=16)
    write(offload, transfer, "a", 10)
    assert offload.write("b", ROW, 10, leaving=True) == 4
    assert offload.write("b", ROW, 10, leaving=True) == 0
    assert offload.statistics().refused_tokens == 12
    assert offload.write("a", ROW, 12, leaving=True) == 2  # its last page has room


def test_reclaim_drops_duplicates_first_and_only_copies_only_when_told() -> None:
    offload, transfer = manager(host_tokens=16)
    for rid in "abcd":
        write(offload, transfer, rid, 4)
    assert offload.detach("a", 4)
    assert offload.detach("b", 4)
    assert offload.reclaim(4, ["x", "a", "c", "d"]) == ["c"]
    assert offload.reclaim(16, ["a", "d"]) == ["d"]
    assert offload.reclaim(12, ["b", "a"], host_only=True) == ["b"]
    assert offload.synced("a") == 4
    assert offload.synced("b") == 0
    assert offload.statistics().reclaimed_tokens == 12
    offload.check_integrity()


def test_no_only_copy_is_dropped_where_all_would_not_do() -> None:
    offload, transfer = manager(host_tokens=16)
    for rid in "abcd":
        write(offload, transfer, rid, 4)
    assert offload.detach("a", 4)
    assert offload.detach("b", 4)
    assert offload.reclaim(16, ["c", "a", "b"], host_only=True) == ["c"]
    assert offload.reclaim(12, ["a", "b"], host_only=True) == ["a", "b"]
    offload.check_integrity()


def test_reclaim_passes_over_copies_in_flight() -> None:
    offload, _ = manager()
    offload.write("a", ROW, 8, leaving=True)
    assert offload.reclaim(64, ["a"], host_only=True) == []


def test_estimates_follow_what_was_measured() -> None:
    offload, transfer = manager()
    assert offload.load_s(1000) == pytest.approx(1.0)
    assert offload.statistics().load_bytes_per_s == 0.0, "that was assumed"
    write(offload, transfer, "a", 24)
    assert offload.evict_s(1000) == pytest.approx(1.0)
    offload.load("a", 0, list(range(24)))
    offload.prepare_forward()
    assert offload.load_s(976) == pytest.approx(1.0)
    settle(offload, transfer)
    assert offload.statistics().loaded_bytes == 24_000
    assert offload.statistics().load_s == pytest.approx(0.024)
    assert offload.statistics().load_bytes_per_s == pytest.approx(1e6)
