"""Checks that what is moved is right: round trips, the fused kernel, a loop like the engine's."""

# ruff: noqa: S311 - chance is not for secrets

from __future__ import annotations

import os
import random
import time
from collections.abc import Collection

import torch
from kv_bench import PATIENCE_S, Bench, pause, settle, write_out

from tokenflow_engine.kv.offload import Event, OffloadManager
from tokenflow_engine.kv.transfer.rows import PoolRows

__all__ = ["engine_like", "one_kernel", "round_trip"]


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
