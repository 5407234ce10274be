"""Is KV moved right, and how fast: checks of `tokenflow_engine.kv` on a GPU, or without one.

    python tests/gpu/check_kv.py                      # a GPU: needs torch, 16 GB on it and as much memory
    python tests/gpu/check_kv.py --device cpu         # the CPU's backend, small
    python tests/gpu/check_kv.py --device simulated   # the GPU's backend, on streams that are simulated

Every check that a wait is there runs without it too, and must then fail. Exits with 1 if anything did.
"""

# ruff: noqa: S311, T201 - chance is not for secrets, and a table is what this prints

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "engine_plugin"))

from simulated_cuda import Simulation

from tokenflow_engine.kv.offload import Event, OffloadManager
from tokenflow_engine.kv.proof import why_not_exact
from tokenflow_engine.kv.transfer.base import Direction, HostMemoryError, Run, Ticket
from tokenflow_engine.kv.transfer.cpu import CpuTransfer
from tokenflow_engine.kv.transfer.rows import PoolRows

WRITE, LOAD = Direction.WRITE, Direction.LOAD
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Shape:
    """Of a model's KV, and how much of it the checks move."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    slots: int
    steps: int
    """Of the engine-like check."""
    moved_tokens: int
    """Where the rate is measured."""


LLAMA_3_8B = Shape(
    layers=32, heads=8, dim=128, dtype=torch.bfloat16, slots=32768, steps=250, moved_tokens=16384
)
TINY = Shape(layers=4, heads=4, dim=64, dtype=torch.float32, slots=8192, steps=250, moved_tokens=4096)
"""The model of the tests (tests/support/tiny_model.py)."""


class Bench:
    """One device, a pool on it as SGLang lays it out, and a forward stream."""

    def __init__(self, device: str, shape: Shape) -> None:
        self.device = torch.device("cuda" if device == "cuda" else "cpu")
        self.shape = shape
        self.on_gpu = device == "cuda"
        self.simulation: Simulation | None = None
        if device == "simulated":
            self.simulation = Simulation()
            self.simulation.install()
        self.has_streams = device != "cpu"
        self.forward_stream = torch.cuda.Stream() if self.has_streams else None
        self.buffers: list[torch.Tensor] = []
        for _ in range(shape.layers):
            both = torch.zeros(2, shape.slots, shape.heads, shape.dim, dtype=shape.dtype, device=self.device)
            self.buffers += [both[0], both[1]]
        self.rows = PoolRows(self.buffers)

    def transfer(
        self,
        host_tokens: int,
        *,
        fused: bool = True,
        omit: Collection[str] = (),
        chunk_bytes: int | None = None,
    ) -> Any:
        options = {} if chunk_bytes is None else {"chunk_bytes": chunk_bytes}
        if not self.has_streams:
            return CpuTransfer(self.buffers, host_tokens=host_tokens, **options)
        from tokenflow_engine.kv.transfer.cuda import CudaTransfer

        transfer = CudaTransfer(
            self.buffers,
            host_tokens=host_tokens,
            forward_stream=self.forward_stream,
            fused=fused and self.on_gpu,
            omit=omit,
            **options,
        )
        if self.simulation is not None:
            transfer._rows.indices = self.late_indices
        return transfer

    def late_indices(self, slots: Any) -> torch.Tensor:
        """As `PoolRows.indices` on a GPU: launched on the current stream, and done when its turn comes."""
        made = torch.cat(list(slots)).to(torch.int64)
        indices = torch.zeros_like(made)
        torch.cuda.current_stream().put(lambda: indices.copy_(made))
        return indices

    def slots(self, tokens: int, *, page: int = 1, seed: int = 0) -> torch.Tensor:
        """Scattered pages; never slot 0, which the engine keeps for padding."""
        pages = list(range(1, self.shape.slots // page))
        random.Random(seed).shuffle(pages)
        flat = [p * page + n for p in pages[: -(-tokens // page)] for n in range(page)]
        return torch.tensor(flat[:tokens], device=self.device)

    def kv(self, stream: int, tokens: torch.Tensor) -> list[torch.Tensor]:
        """What the forward pass computes for these tokens: different in every word of every token."""
        base = ((stream * 1_000_003 + tokens) * 1_000_033).unsqueeze(1)
        return [
            base + n * 10_007 + torch.arange(table.shape[1], device=self.device)
            for n, table in enumerate(self.rows.tables)
        ]

    def tokens(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self.device)

    @contextmanager
    def forward(self, *, delay_ms: float = 0.0) -> Iterator[None]:
        """A forward pass: on its stream, behind the current one, and later than launched by `delay_ms`."""
        if self.forward_stream is None:
            yield
            return
        with torch.cuda.stream(self.forward_stream):
            self.forward_stream.wait_stream(torch.cuda.default_stream())
            sleep(delay_ms)
            yield

    def fill(self, slots: torch.Tensor, values: list[torch.Tensor]) -> None:
        for table, value in zip(self.rows.tables, values, strict=True):
            table.index_copy_(0, slots, value)

    def differ(self, slots: torch.Tensor, values: list[torch.Tensor]) -> bool:
        pairs = zip(self.rows.tables, values, strict=True)
        return any(not torch.equal(table.index_select(0, slots), value) for table, value in pairs)

    def synchronize(self) -> None:
        if self.has_streams:
            torch.cuda.synchronize()


def sleep(milliseconds: float) -> None:
    """Keep the current CUDA stream busy."""
    if milliseconds:
        torch.cuda._sleep(int(milliseconds * 2e6))  # cycles, at about 2 GHz


def pause() -> None:
    """Between two looks: let a CPU's copying thread have the interpreter."""
    time.sleep(1e-4)


def finish(transfer: Any, tickets: Collection[Ticket] = ()) -> list[Any]:
    """Wait until these copies are over."""
    left, finished, deadline = set(tickets), [], time.monotonic() + PATIENCE_S
    while left:
        assert time.monotonic() < deadline, "a copy does not finish"
        pause()
        for done in transfer.poll():
            left.discard(done.ticket)
            finished.append(done)
    return finished


def settle(offload: OffloadManager, until: Event, rid: str) -> Any:
    """Poll until this is reported."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        pause()
        offload.prepare_forward()
        for done in offload.poll():
            if (done.event, done.rid) == (until, rid):
                return done
            assert done.event in (Event.WRITTEN, Event.LOADED), done
    raise AssertionError(f"{rid} is never {until.name}")


def write_out(offload: OffloadManager, rid: str, row: torch.Tensor, tokens: int) -> None:
    assert offload.write(rid, row, tokens, leaving=True) == tokens
    deadline = time.monotonic() + PATIENCE_S
    while offload.synced(rid) < tokens:
        assert time.monotonic() < deadline, "the write does not finish"
        pause()
        offload.prepare_forward()
        assert all(done.event is Event.WRITTEN for done in offload.poll())


# ---- what is moved is right -----------------------------------------------------------------------------


def round_trip(bench: Bench, *, page: int, fused: bool = True) -> str:
    """Out, erased, back to other slots: every bit the same. A page partly filled is added to later."""
    transfer = bench.transfer(4096, fused=fused)
    offload = OffloadManager(transfer, page_tokens=16, verify=not bench.on_gpu)
    count, more = 1003, 1500
    row, values = bench.slots(more, page=page), bench.kv(1, bench.tokens(more))
    with bench.forward():
        bench.fill(row, values)
    offload.forward_launched()
    write_out(offload, "a", row, count)
    assert offload.write("a", row, more, leaving=True) == more - count
    while not offload.detach("a", more):
        offload.prepare_forward()
        offload.poll()
    with bench.forward():
        bench.fill(row, [torch.full_like(value, -1) for value in values])
    offload.forward_launched()
    back = bench.slots(more, page=page, seed=7)
    while offload.is_writing("a"):
        offload.poll()
    offload.load("a", 0, back)
    settle(offload, Event.LOADED, "a")
    assert not bench.differ(back, values), "what came back is not what left"
    back_values = [value.clone() for value in values]
    back_values[3][5, 2] ^= 1
    assert bench.differ(back, back_values), "the comparison does not see one bit"
    offload.check_integrity()
    offload.close()
    return f"{more} tokens, {transfer.bytes_per_token} B each"


def one_kernel(bench: Bench) -> str:
    """The kernel over all layers does what torch does layer by layer; K and V may be of unlike width.

    On a CPU, Triton interprets it.
    """
    if not bench.on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    from tokenflow_engine.kv.transfer.fused import FusedRows

    for width in (64, 576, 2048):
        shapes = [(50, 2, 24), (50, width)] * 3
        pool = PoolRows([torch.randn(shape, device=bench.device).to(torch.bfloat16) for shape in shapes])
        fused, slots = FusedRows(pool), torch.randperm(50, device=bench.device)[:20]
        expected = torch.empty(20, pool.words, dtype=pool.word, device=bench.device)
        gathered = torch.zeros_like(expected)
        pool.gather(slots, expected)
        fused.gather(slots, gathered)
        assert torch.equal(gathered, expected), f"gather of rows of {width}"
        before = [table.clone() for table in pool.tables]
        target = slots.flip(0)
        fused.scatter(target, gathered)
        after = [table.clone() for table in pool.tables]
        for table, untouched in zip(pool.tables, before, strict=True):
            table.copy_(untouched)
        pool.scatter(target, gathered)
        pairs = zip(pool.tables, after, strict=True)
        assert all(torch.equal(table, other) for table, other in pairs), f"scatter of rows of {width}"
    return "compiled" if bench.on_gpu else "interpreted"


class Stream:
    def __init__(self, row: torch.Tensor) -> None:
        self.row = row
        self.begin(0)

    def begin(self, number: int) -> None:
        self.number = number
        self.rid = f"s{number}"
        self.slots: list[int] = []
        self.length = 0
        self.place = "running"


def engine_like(bench: Bench, *, page: int, omit: Collection[str] = ()) -> str:
    """A loop like the engine's: streams append, leave, return, end; their slots are reused at once."""
    transfer = bench.transfer(8192, omit=omit, chunk_bytes=64 * bench.rows.bytes_per_token)
    offload = OffloadManager(transfer, page_tokens=4)
    loop = _EngineLoop(bench, offload, page)
    for step in range(bench.shape.steps):
        loop.step(step)
    loop.bring_all_back()
    wrong = [s.rid for s in loop.streams if loop.is_wrong(s)]
    statistics = offload.statistics()
    offload.check_integrity()
    offload.close()
    assert not wrong, f"KV of {len(wrong)} of {len(loop.streams)} streams is wrong"
    assert statistics.loaded_bytes > 0
    assert loop.departures > 10
    moved = f"{statistics.loaded_bytes / 2**20:.0f} MiB loaded"
    return f"{loop.departures} departures, {loop.ends} ends, {moved}"


class _EngineLoop:
    """Pages go back to the front of the free list: the next stream to grow overwrites them."""

    def __init__(self, bench: Bench, offload: OffloadManager, page: int) -> None:
        self.bench, self.offload, self.page = bench, offload, page
        self.chance = random.Random(3)
        self.free = bench.slots(6400, page=page)[::page].tolist()
        self.most = 100 + bench.shape.steps
        rows = torch.zeros(16, self.most, dtype=torch.int32, device=bench.device)
        self.streams = [Stream(row) for row in rows]
        self.releasing: dict[str, list[int]] = {}
        self.departures = self.ends = self.begun = 0
        for stream in self.streams:
            self.begin(stream)
        self.step(0)

    def begin(self, stream: Stream) -> None:
        self.begun += 1
        stream.begin(self.begun)

    def append(self, stream: Stream, tokens: int) -> None:
        while len(stream.slots) < stream.length + tokens:
            first = self.free.pop()
            stream.slots += range(first, first + self.page)
        stream.length += tokens
        stream.row[: stream.length] = torch.tensor(stream.slots[: stream.length], dtype=torch.int32)

    def give_back(self, slots: list[int]) -> None:
        self.free += slots[:: self.page]
        slots.clear()

    def end(self, stream: Stream) -> None:
        """Wherever it is; another one begins in its place."""
        self.ends += 1
        if self.offload.drop(stream.rid):
            self.give_back(stream.slots)
        else:
            self.releasing[stream.rid] = stream.slots
        self.begin(stream)

    def forward(self, grown: list[tuple[Stream, int]]) -> None:
        """Compute the KV of the tokens from each start on."""
        self.offload.prepare_forward()
        with self.bench.forward(delay_ms=0.2 if self.bench.on_gpu else 0):
            slots = torch.cat([s.row[start : s.length].long() for s, start in grown])
            tokens = [torch.arange(start, s.length, device=self.bench.device) for s, start in grown]
            kv = [self.bench.kv(s.number, t) for (s, _), t in zip(grown, tokens, strict=True)]
            self.bench.fill(slots, [torch.cat(values) for values in zip(*kv, strict=True)])
        self.offload.forward_launched()

    def step(self, step: int) -> None:
        self.handle_events()
        for stream in self.streams:
            if stream.place == "leaving":
                self.leave(stream)
        running = [s for s in self.streams if s.place == "running" and s.length]
        if step % 3 == 0 and len(running) > 4:
            stream = self.chance.choice(running)
            stream.place = "leaving"
            self.leave(stream)
        if step % 5 == 4:
            self.end(self.chance.choice(self.streams))
        parked = [s for s in self.streams if s.place == "parked" and not self.offload.is_writing(s.rid)]
        if parked and step % 3 == 1:
            self.come_back(self.chance.choice(parked))
        running = [s for s in self.streams if s.place == "running"]
        self.offload.begin_iteration(24)
        for stream in running:
            if stream.length:
                self.offload.write(stream.rid, stream.row, stream.length)
        starts = [(s, s.length) for s in running]
        for stream in running:
            self.append(stream, 1 if stream.length else self.chance.randint(20, 100))
        self.forward(starts)

    def leave(self, stream: Stream) -> None:
        self.offload.write(stream.rid, stream.row, stream.length, leaving=True)
        self.offload.prepare_forward()
        if self.offload.detach(stream.rid, stream.length):
            self.give_back(stream.slots)
            stream.place = "parked"
            self.departures += 1

    def come_back(self, stream: Stream) -> None:
        length, stream.length = stream.length, 0
        self.append(stream, length)
        stream.place = "loading"
        self.offload.load(stream.rid, 0, stream.row[:length].clone())

    def handle_events(self) -> None:
        for done in self.offload.poll():
            assert done.event in (Event.WRITTEN, Event.LOADED, Event.RELEASED), done
            if done.event is Event.LOADED:
                next(s for s in self.streams if s.rid == done.rid).place = "running"
            elif done.event is Event.RELEASED:
                self.give_back(self.releasing.pop(done.rid))

    def bring_all_back(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while any(s.place != "running" for s in self.streams):
            assert time.monotonic() < deadline, "streams do not come back"
            pause()
            self.handle_events()
            for stream in self.streams:
                if stream.place == "leaving":
                    self.leave(stream)
                elif stream.place == "parked" and not self.offload.is_writing(stream.rid):
                    self.come_back(stream)
            self.offload.prepare_forward()
        self.bench.synchronize()

    def is_wrong(self, stream: Stream) -> bool:
        tokens = torch.arange(stream.length, device=self.bench.device)
        slots = stream.row[: stream.length].long()
        return self.bench.differ(slots, self.bench.kv(stream.number, tokens))


# ---- what fails is noticed ------------------------------------------------------------------------------


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


# ---- what must wait does --------------------------------------------------------------------------------


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


# ---- how fast -------------------------------------------------------------------------------------------


def plain_copy_gbs(bench: Bench, direction: Direction, size: int) -> float:
    """One contiguous copy at a time, which nothing can beat."""
    piece = 128 << 20
    near = torch.empty(piece, dtype=torch.uint8, device=bench.device)
    far = torch.empty(piece, dtype=torch.uint8, pin_memory=bench.on_gpu)
    source, target = (near, far) if direction is WRITE else (far, near)
    target.copy_(source, non_blocking=True)
    bench.synchronize()
    started, repeats = time.perf_counter(), max(1, size // piece)
    for _ in range(repeats):
        target.copy_(source, non_blocking=True)
    bench.synchronize()
    return piece * repeats / (time.perf_counter() - started) / 1e9


class Traffic:
    """Copies of random slots and scattered host pages, kept in flight as the manager keeps them."""

    def __init__(self, bench: Bench, transfer: Any, host_page: int) -> None:
        self.transfer = transfer
        tokens = bench.shape.moved_tokens
        self.slots = {d: bench.slots(tokens, seed=int(d)) for d in Direction}
        pages = list(range(tokens // host_page))
        random.Random(1).shuffle(pages)
        self.size = transfer.chunk_tokens // host_page * host_page
        self.runs = {
            d: [
                [Run(int(d) * tokens + page * host_page, host_page) for page in part]
                for part in _parts(pages, self.size // host_page)
            ]
            for d in Direction
        }
        self.at = dict.fromkeys(Direction, 0)
        self.in_flight: dict[Direction, set[Ticket]] = {d: set() for d in Direction}
        self.submitted_s = 0.0
        self.submitted = 0
        self.copied_tokens = 0

    def pump(self, directions: Collection[Direction], depth: int = 8) -> None:
        for done in self.transfer.poll():
            assert done.error is None, done.error
            self.in_flight[done.ticket.direction].discard(done.ticket)
            self.copied_tokens += done.ticket.tokens
        for direction in directions:
            while len(self.in_flight[direction]) < depth:
                self._submit(direction)

    def _submit(self, direction: Direction) -> None:
        runs = self.runs[direction][self.at[direction] % len(self.runs[direction])]
        first = self.at[direction] * self.size % (len(self.slots[direction]) - self.size)
        tokens = sum(run.tokens for run in runs)
        started = time.perf_counter()
        ticket = self.transfer.submit(direction, [self.slots[direction][first : first + tokens]], runs)
        self.submitted_s += time.perf_counter() - started
        self.submitted += 1
        self.in_flight[direction].add(ticket)
        self.at[direction] += 1

    def drain(self) -> None:
        while any(self.in_flight.values()):
            pause()
            self.pump(())

    def gbs(self, directions: Collection[Direction], tokens: int) -> float:
        self.pump(directions)
        self.drain()
        started, self.copied_tokens = time.perf_counter(), 0
        while self.copied_tokens < tokens:
            pause()
            self.pump(directions)
        self.drain()
        return self.copied_tokens * self.transfer.bytes_per_token / (time.perf_counter() - started) / 1e9


def _parts(items: list[int], size: int) -> list[list[int]]:
    return [items[at : at + size] for at in range(0, len(items) - size + 1, size)]


def rate(bench: Bench, *, host_page: int, fused: bool = True) -> str:
    """Against a plain copy of as many bytes; on a GPU at least half of it."""
    transfer = bench.transfer(2 * bench.shape.moved_tokens, fused=fused)
    traffic, tokens = Traffic(bench, transfer, host_page), bench.shape.moved_tokens
    figures = []
    for direction, name in ((WRITE, "out"), (LOAD, "in")):
        plain = plain_copy_gbs(bench, direction, tokens * transfer.bytes_per_token)
        ours = traffic.gbs([direction], tokens)
        figures.append(f"{name} {ours:.2f} GB/s of {plain:.2f} ({ours / plain:.0%})")
        assert not bench.on_gpu or ours > plain / 2, f"slow: {figures[-1]}"
    figures.append(f"both {traffic.gbs([WRITE, LOAD], 2 * tokens):.2f}")
    figures.append(f"{1e6 * traffic.submitted_s / traffic.submitted:.0f} us to submit {traffic.size} tokens")
    transfer.close()
    return ", ".join(figures)


def slowdown(bench: Bench, *, budget: float) -> str:
    """Of a loop of matrix products, like a decode step's, beside writes.

    They take `budget` of the time of each step; 1.0 keeps the link busy all the time.
    """
    transfer = bench.transfer(2 * bench.shape.moved_tokens)
    traffic = Traffic(bench, transfer, 16)
    alone = min(_loop_s(bench, lambda _: None) for _ in range(3))
    chunk_s = traffic.size * transfer.bytes_per_token / (traffic.gbs([WRITE], bench.shape.moved_tokens) * 1e9)
    credit = 0.0

    def pump(step_s: float) -> None:
        nonlocal credit
        credit += step_s * budget
        traffic.pump(())
        while credit > 0 and len(traffic.in_flight[WRITE]) < 8:
            traffic._submit(WRITE)
            credit -= chunk_s

    beside = min(_loop_s(bench, pump, alone) for _ in range(3))
    traffic.drain()
    transfer.close()
    extra = beside / alone - 1
    assert not bench.on_gpu or extra < 0.25, f"{extra:.0%} slower"
    return f"step {1e3 * alone:.2f} ms alone, {1e3 * beside:.2f} ms beside ({extra:+.0%})"


def _loop_s(bench: Bench, beside: Callable[[float], None], step_s: float = 0.0) -> float:
    """Seconds of a step: products of a batch of 64 with a weight, bound by memory as decoding is."""
    width, products, steps = (4096, 512, 20) if bench.on_gpu else (256, 32, 100)
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    batch = torch.randn(64, width, device=bench.device, dtype=dtype)
    weights = torch.randn(8, width, width, device=bench.device, dtype=dtype)
    out = torch.empty_like(batch)
    bench.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        with bench.forward():
            for n in range(products):
                torch.mm(batch, weights[n % 8], out=out)
        beside(step_s)
        if bench.forward_stream is not None:
            bench.forward_stream.synchronize()
    return (time.perf_counter() - started) / steps


# ---- the table ------------------------------------------------------------------------------------------


def checks(device: str) -> list[tuple[str, Callable[[Bench], str]]]:
    def bind(function: Callable[..., str], **options: Any) -> Callable[[Bench], str]:
        return lambda bench: function(bench, **options)

    common = [
        ("round trip, device pages of 1", bind(round_trip, page=1)),
        ("round trip, device pages of 16", bind(round_trip, page=16)),
        ("engine-like loop, device pages of 1", bind(engine_like, page=1)),
        ("engine-like loop, device pages of 16", bind(engine_like, page=16)),
        ("a backend proves itself", proof),
        ("a faulty backend does not", faulty_backend),
        ("corrupt host copy is not loaded", corrupt_copy),
        ("failing write is reported", bind(failing_copy, direction=WRITE)),
        ("failing load is reported", bind(failing_copy, direction=LOAD)),
        ("too little memory is said", too_much_memory),
    ]
    kernel = ("one kernel for all layers", one_kernel)
    speed = [
        ("rate, host pages of 16", bind(rate, host_page=16)),
        ("slowdown, link busy", bind(slowdown, budget=1.0)),
        ("slowdown, 10 % of the time", bind(slowdown, budget=0.1)),
    ]
    if device == "cpu":
        return [*common, kernel, ("slots are not reused too early", slots_reused_too_early), *speed]
    situations = [
        ("forward", slow_forward_then_write),
        ("forward", slow_forward_then_load),
        ("reuse", reused_while_read),
        ("reuse", loaded_while_read),
        ("staging", many_writes),
        ("staging", many_loads),
    ]
    if device == "simulated":  # a real one would read from slots that do not exist
        situations.append(("indices", plain_write))
    waits = [
        (f"wait '{omit}': {situation.__name__}", bind(wait_is_there, omit=omit, situation=situation))
        for omit, situation in situations
    ]
    if device == "simulated":
        return [*common, *waits]
    return [
        *common,
        kernel,
        ("round trip, layer by layer", bind(round_trip, page=1, fused=False)),
        *waits,
        *speed,
        ("rate, host pages of 64", bind(rate, host_page=64)),
        ("rate, layer by layer", bind(rate, host_page=64, fused=False)),
    ]


def run(device: str, *, rates: bool, as_json: bool) -> bool:
    bench = Bench(device, LLAMA_3_8B if device == "cuda" else TINY)
    sound = True
    for name, check in checks(device):
        if name.startswith(("rate", "slowdown")) and not rates:
            continue
        started = time.perf_counter()
        try:
            passed, said = True, check(bench)
        except Exception as error:  # noqa: BLE001 - the other checks go on
            passed, said = False, f"{type(error).__name__}: {error}"
            traceback.print_exc()
        sound &= passed
        seconds = time.perf_counter() - started
        if as_json:
            print(json.dumps({"check": name, "passed": passed, "said": said}), flush=True)
        else:
            print(f"{'ok  ' if passed else 'FAIL'}  {name:<42} {seconds:6.1f} s  {said}", flush=True)
    return sound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu", "simulated"], default="cuda")
    parser.add_argument("--no-rates", dest="rates", action="store_false", help="only whether all is right")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; --device cpu tries the script itself")
    sys.exit(0 if run(options.device, rates=options.rates, as_json=options.json) else 1)


if __name__ == "__main__":
    main()
