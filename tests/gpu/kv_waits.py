"""Checks that what must wait does, each run without the wait as well, and then wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import torch
from kv_bench import LOAD, PATIENCE_S, WRITE, Bench, finish, sleep

from tokenflow_engine.kv.offload import OffloadManager
from tokenflow_engine.kv.transfer.base import Direction, Run, Ticket

__all__ = [
    "loaded_while_read",
    "many_loads",
    "many_writes",
    "plain_write",
    "reused_while_read",
    "slots_reused_too_early",
    "slow_forward_then_load",
    "slow_forward_then_write",
    "wait_is_there",
]


def rows_differ(bench: Bench, transfer: Any, values: list[torch.Tensor]) -> bool:
    """Whether the first host rows are anything else than this KV."""
    expected = torch.cat(values, dim=1).cpu()
    return not torch.equal(transfer.table[: len(expected)], expected)


def slow_forward_then_write(bench: Bench, transfer: Any) -> bool:
    slots, values = bench.slots(64), bench.kv(2, bench.tokens(64))
    bench.fill(slots, bench.kv(3, bench.tokens(64)))
    bench.synchronize()
    with bench.forward(delay_ms=20):
        bench.fill(slots, values)
    transfer.forward_launched()
    finish(transfer, [transfer.submit(WRITE, [slots], [Run(0, 64)])])
    bench.synchronize()
    return rows_differ(bench, transfer, values)


def slow_forward_then_load(bench: Bench, transfer: Any) -> bool:
    """The last pass of a stream that has ended still writes to a slot that the load has got."""
    slots, values = bench.slots(64), bench.kv(2, bench.tokens(64))
    transfer.table[:64] = torch.cat(values, dim=1).cpu()
    with bench.forward(delay_ms=20):
        bench.fill(slots, bench.kv(3, bench.tokens(64)))
    transfer.forward_launched()
    finish(transfer, [transfer.submit(LOAD, [slots], [Run(0, 64)])])
    bench.synchronize()
    return bench.differ(slots, values)


def reused_while_read(bench: Bench, transfer: Any) -> bool:
    """Slots are given away while the gather has not begun."""
    slots, values = bench.slots(64), bench.kv(2, bench.tokens(64))
    bench.fill(slots, values)
    bench.synchronize()
    with torch.cuda.stream(transfer.lanes[WRITE].pool_stream):
        sleep(20)
    ticket = transfer.submit(WRITE, [slots], [Run(0, 64)])
    assert transfer.release(ticket)
    with bench.forward():
        bench.fill(slots, bench.kv(3, bench.tokens(64)))
    finish(transfer, [ticket])
    return rows_differ(bench, transfer, values)


def loaded_while_read(bench: Bench, transfer: Any) -> bool:
    """As before, and it is a load that gets the slots."""
    slots, values = bench.slots(64), bench.kv(2, bench.tokens(64))
    bench.fill(slots, values)
    bench.synchronize()
    with torch.cuda.stream(transfer.lanes[WRITE].pool_stream):
        sleep(20)
    ticket = transfer.submit(WRITE, [slots], [Run(0, 64)])
    assert transfer.release(ticket)
    finish(transfer, [ticket, transfer.submit(LOAD, [slots], [Run(64, 64)])])
    return rows_differ(bench, transfer, values)


def plain_write(bench: Bench, transfer: Any) -> bool:
    slots, values = bench.slots(64), bench.kv(2, bench.tokens(64))
    bench.fill(slots, values)
    bench.synchronize()
    finish(transfer, [transfer.submit(WRITE, [slots], [Run(0, 64)])])
    return rows_differ(bench, transfer, values)


def many_writes(bench: Bench, transfer: Any) -> bool:
    """More chunks than staging buffers, over a link that is slow to begin."""
    count = 5 * transfer.chunk_tokens
    slots, values = bench.slots(count), bench.kv(2, bench.tokens(count))
    bench.fill(slots, values)
    bench.synchronize()
    with torch.cuda.stream(transfer.lanes[WRITE].link_stream):
        sleep(20)
    finish(transfer, submit_all(transfer, WRITE, slots))
    return rows_differ(bench, transfer, values)


def many_loads(bench: Bench, transfer: Any) -> bool:
    count = 5 * transfer.chunk_tokens
    slots, values = bench.slots(count), bench.kv(2, bench.tokens(count))
    transfer.table[:count] = torch.cat(values, dim=1).cpu()
    with torch.cuda.stream(transfer.lanes[LOAD].pool_stream):
        sleep(20)
    finish(transfer, submit_all(transfer, LOAD, slots))
    return bench.differ(slots, values)


def submit_all(transfer: Any, direction: Direction, slots: torch.Tensor) -> list[Ticket]:
    size = transfer.chunk_tokens
    return [
        transfer.submit(direction, [slots[at : at + size]], [Run(at, min(size, len(slots) - at))])
        for at in range(0, len(slots), size)
    ]


def wait_is_there(bench: Bench, *, omit: str, situation: Callable[[Bench, Any], bool]) -> str:
    """Right with the wait, wrong without it: on a simulated GPU in some of many orders."""

    def is_wrong(omitted: Collection[str], seed: int) -> bool:
        if bench.simulation is not None:
            bench.simulation.seed(seed)
        transfer = bench.transfer(1024, omit=omitted, chunk_bytes=64 * bench.rows.bytes_per_token)
        wrong = situation(bench, transfer)
        bench.synchronize()
        transfer.close()
        return wrong

    seeds = range(1 if bench.simulation is None else 20)
    assert not any(is_wrong((), seed) for seed in seeds), "data is wrong"
    without = sum(is_wrong((omit,), seed) for seed in seeds)
    assert without, "nothing is wrong without the wait either"
    return f"and wrong without it ({without} of {len(seeds)})"


def slots_reused_too_early(bench: Bench) -> str:
    """On a CPU nothing but `detach` keeps slots from being reused; without it, the copy would be wrong."""
    for early in (False, True):
        transfer, begun, go = bench.transfer(256), threading.Event(), threading.Event()

        def fault(*_: Any, begun: threading.Event = begun, go: threading.Event = go) -> None:
            begun.set()
            go.wait(PATIENCE_S)

        transfer._fault = fault
        offload = OffloadManager(transfer, page_tokens=16)
        slots, values = bench.slots(64), bench.kv(2, bench.tokens(64))
        bench.fill(slots, values)
        offload.write("a", slots, 64, leaving=True)
        offload.prepare_forward()
        assert begun.wait(PATIENCE_S)
        offload.poll()
        assert not offload.detach("a", 64)
        if early:
            bench.fill(slots, bench.kv(3, bench.tokens(64)))
        go.set()
        while not offload.detach("a", 64):
            offload.poll()
        bench.fill(slots, bench.kv(3, bench.tokens(64)))
        assert rows_differ(bench, transfer, values) is early
        offload.close()
    return "and wrong without it"
