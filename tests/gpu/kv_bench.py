"""The device, its pool and the model's shape that the checks of `check_kv` run on, and what they wait for."""

# ruff: noqa: S311 - chance is not for secrets

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from simulated_cuda import Simulation

from tokenflow_engine.kv.offload import Event, OffloadManager
from tokenflow_engine.kv.transfer.base import Direction, Ticket
from tokenflow_engine.kv.transfer.cpu import CpuTransfer
from tokenflow_engine.kv.transfer.rows import PoolRows

__all__ = [
    "LLAMA_3_8B",
    "LOAD",
    "PATIENCE_S",
    "TINY",
    "WRITE",
    "Bench",
    "finish",
    "pause",
    "settle",
    "sleep",
    "write_out",
]

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
