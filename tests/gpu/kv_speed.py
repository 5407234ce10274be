"""How fast KV is copied, and what it costs a forward pass beside it."""

# ruff: noqa: S311 - chance is not for secrets

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from kv_bench import LOAD, WRITE, Bench, pause

from tokenflow_engine.kv.transfer.base import Direction, Run, Ticket

__all__ = ["rate", "slowdown"]


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
