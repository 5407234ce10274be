"""Checks that what fails is noticed: copies, backends, memory."""

from __future__ import annotations

from typing import Any

import torch
from kv_bench import LOAD, WRITE, Bench, settle, write_out

from tokenflow_engine.kv.offload import Event, OffloadManager
from tokenflow_engine.kv.proof import why_not_exact
from tokenflow_engine.kv.transfer.base import Direction, HostMemoryError, Ticket

__all__ = [
    "corrupt_copy",
    "failed_copy_is_not_saved",
    "failing_copy",
    "faulty_backend",
    "proof",
    "too_much_memory",
]


def failed_copy_is_not_saved(bench: Bench) -> str:
    """Asked at once, before anybody has heard of the failure: the slots are not free."""
    transfer = bench.transfer(256)
    offload = OffloadManager(transfer, page_tokens=16)
    row = bench.slots(40)
    for fails in (True, False):
        transfer._fault = _fail if fails else None
        offload.write("a", row, 40, leaving=True)
        offload.prepare_forward()
        if fails:
            assert not offload.detach("a", 40)
            settle(offload, Event.WRITE_FAILED, "a")
    settle(offload, Event.WRITTEN, "a")
    assert offload.detach("a", 40)
    offload.close()
    return "and is once it was written"


def _fail(*_: Any) -> None:
    raise RuntimeError("out of order")


def corrupt_copy(bench: Bench) -> str:
    """A flipped bit in host memory fails the load, and leaves what is before it usable."""
    transfer = bench.transfer(1024)
    offload = OffloadManager(transfer, page_tokens=16, verify=True)
    row, values = bench.slots(100), bench.kv(1, bench.tokens(100))
    bench.fill(row, values)
    bench.synchronize()
    write_out(offload, "a", row, 100)
    (run,) = offload.host_rows("a", 50, 51)
    transfer.table[run.row, 7] ^= 1
    assert offload.detach("a", 100)
    back = bench.slots(100, seed=7)
    offload.load("a", 0, back)
    failed = settle(offload, Event.LOAD_FAILED, "a")
    assert "corrupt" in failed.error
    assert offload.synced("a") == 50
    offload.load("a", 0, back[:50])
    settle(offload, Event.LOADED, "a")
    assert not bench.differ(back[:50], [value[:50] for value in values])
    offload.close()
    return failed.error


class _Faulty:
    """A backend that does one thing wrong as it loads."""

    def __init__(self, transfer: Any, fault: str) -> None:
        self._transfer = transfer
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def submit(self, direction: Direction, slots: Any, runs: Any) -> Ticket:
        if direction is LOAD and self._fault == "one bit":
            self._transfer.table[runs[-1].row, -1] ^= 1
        elif direction is LOAD and self._fault == "other slots":
            slots = [torch.roll(part, 1) for part in slots]
        elif direction is LOAD and self._fault == "nothing":
            direction = WRITE
        elif direction is LOAD and self._fault == "an error":
            raise RuntimeError("this backend does not load")
        return self._transfer.submit(direction, slots, runs)


def proof(bench: Bench) -> str:
    """A backend proves itself on slots that hold afterwards what they held before."""
    slots, values = bench.slots(64, page=16), bench.kv(1, bench.tokens(64))
    bench.fill(slots, values)
    bench.synchronize()
    for count, host_tokens in ((64, 1024), (64, 40), (1, 16)):
        transfer = bench.transfer(host_tokens, chunk_bytes=10 * bench.rows.bytes_per_token)
        why_not = why_not_exact(transfer, bench.rows, slots[:count])
        assert why_not is None, why_not
        assert not bench.differ(slots, values), "the proof has left something behind"
        transfer.close()
    return "64, 40 and 1 tokens"


def faulty_backend(bench: Bench) -> str:
    slots, values = bench.slots(64, page=16), bench.kv(1, bench.tokens(64))
    bench.fill(slots, values)
    bench.synchronize()
    said = []
    for fault in ("one bit", "other slots", "nothing", "an error"):
        why_not = why_not_exact(_Faulty(bench.transfer(1024), fault), bench.rows, slots)
        assert why_not is not None, f"{fault} goes unnoticed"
        assert not bench.differ(slots, values), "the proof has left something behind"
        said.append(why_not)
    return said[0]


def failing_copy(bench: Bench, *, direction: Direction) -> str:
    """A copy that fails is reported, and the next try is sound."""
    transfer = bench.transfer(1024)
    offload = OffloadManager(transfer, page_tokens=16)
    row, values = bench.slots(100), bench.kv(1, bench.tokens(100))
    bench.fill(row, values)
    bench.synchronize()
    broken = [direction]

    def fault(at: Direction, _: Any) -> None:
        if at in broken:
            raise RuntimeError("out of order")

    transfer._fault = fault
    if direction is WRITE:
        offload.write("a", row, 100, leaving=True)
        error = settle(offload, Event.WRITE_FAILED, "a").error
        assert offload.synced("a") == 0
        assert not offload.detach("a", 100)
        broken.clear()
    write_out(offload, "a", row, 100)
    assert offload.detach("a", 100)
    back = bench.slots(100, seed=7)
    if direction is LOAD:
        offload.load("a", 0, back)
        error = settle(offload, Event.LOAD_FAILED, "a").error
        broken.clear()
    offload.load("a", 0, back)
    settle(offload, Event.LOADED, "a")
    assert not bench.differ(back, values)
    offload.check_integrity()
    offload.close()
    return error


def too_much_memory(bench: Bench) -> str:
    try:
        bench.transfer(2**50 // bench.rows.bytes_per_token)
    except HostMemoryError as error:
        return str(error)
    raise AssertionError("a petabyte of host memory was given")
