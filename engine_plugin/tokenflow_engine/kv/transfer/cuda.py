"""KV copies between a GPU and pinned host memory, beside the forward passes.

Each direction has two streams and a ring of staging buffers on the GPU, so that a chunk is gathered (or
scattered) while the one before it is on the link. All that must not overlap is ordered by events on the
device; the host only asks.

    write:  forward pass -> gather into staging -> copy to the host       staging is free after the copy
    load:   copy into staging -> scatter, behind the last forward pass    staging is free after the scatter

Gathering first is what makes the copies long: a token's KV is many pieces of a few KB in the pool, and one in
the host table (Strata's scheme). The gather alone reads the pool, so that slots are free for others long
before the copy is over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenflow_engine.kv.transfer import host
from tokenflow_engine.kv.transfer.base import (
    Direction,
    Finished,
    HostMemoryError,
    Run,
    Slots,
    Ticket,
    TransferFault,
)
from tokenflow_engine.kv.transfer.rows import PoolRows

__all__ = ["CudaTransfer"]

_CHUNK_BYTES = 32 << 20
"""Large enough for the link's full rate (8 MB on PCIe 5), small enough to wait for."""
_RING = 2

_logger = logging.getLogger(__name__)


class _Mover(Protocol):
    def gather(self, indices: torch.Tensor, out: torch.Tensor) -> None: ...

    def scatter(self, indices: torch.Tensor, rows: torch.Tensor) -> None: ...


@dataclass(slots=True)
class _Copy:
    """One copy in flight. Its events are complete in the order of the stream that they are recorded on."""

    ticket: Ticket
    indices: torch.Tensor
    """Kept until the copy is over: they were made on another stream."""
    started: torch.cuda.Event
    copied: torch.cuda.Event
    """On the link: `started` to `copied`."""
    touched: torch.cuda.Event
    """The gather or scatter is over: nothing of this copy touches the pool any more."""

    @property
    def is_over(self) -> bool:
        last = self.copied if self.ticket.direction is Direction.WRITE else self.touched
        return bool(last.query())


class _Lane:
    """One direction: its streams, its staging, its copies in flight."""

    def __init__(self, staging: list[torch.Tensor]) -> None:
        device = staging[0].device
        self.pool_stream = torch.cuda.Stream(device)
        """Gathers or scatters."""
        self.link_stream = torch.cuda.Stream(device)
        self.in_flight: deque[_Copy] = deque()
        self.indices_made = torch.cuda.Event()
        self._staging = staging
        self._drained = [torch.cuda.Event() for _ in staging]
        self._turn = 0

    def next_staging(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The next buffer, and the event to wait for before filling and to record after draining it."""
        self._turn = (self._turn + 1) % len(self._staging)
        return self._staging[self._turn], self._drained[self._turn]

    def synchronize(self) -> None:
        self.link_stream.synchronize()
        self.pool_stream.synchronize()


class CudaTransfer:
    """Four streams of its own; nothing blocks but the constructor, `digests`, `close`, and a failure.

    `omit` leaves out waits (`forward`, `indices`, `reuse`, `staging`): only to show that a test would notice.
    `table`, the host table, and `lanes` are for tests to tamper with.
    """

    assumed_bytes_per_s = 20e9

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        host_tokens: int,
        forward_stream: torch.cuda.Stream | None = None,
        chunk_bytes: int = _CHUNK_BYTES,
        fused: bool = True,
        fault: TransferFault | None = None,
        omit: Collection[str] = (),
    ) -> None:
        rows = PoolRows(buffers)
        self._rows = rows
        self._forward_stream = forward_stream
        self._fault = fault
        self._omit = frozenset(omit)
        self.host_tokens = host_tokens
        self.bytes_per_token = rows.bytes_per_token
        self.chunk_tokens = max(1, chunk_bytes // rows.bytes_per_token)
        shape = (self.chunk_tokens, rows.words)
        with torch.cuda.device(rows.device):
            self.lanes = {
                direction: _Lane(
                    [torch.empty(shape, dtype=rows.word, device=rows.device) for _ in range(_RING)]
                )
                for direction in Direction
            }
            self._mover = _mover(rows, fused=fused)
            self._forward_done = torch.cuda.Event()
        self._free_events: dict[bool, list[torch.cuda.Event]] = {True: [], False: []}
        self._failed: list[Finished] = []
        self.table = host.host_table(host_tokens, rows.words, rows.word)
        _pin(self.table)

    def submit(self, direction: Direction, slots: Sequence[Slots], runs: Sequence[Run]) -> Ticket:
        ticket = Ticket(direction, sum(run.tokens for run in runs))
        lane = self.lanes[direction]
        try:
            self._start(lane, ticket, slots, runs)
        except Exception as error:  # noqa: BLE001 - whatever it was, this copy did not happen
            lane.synchronize()
            self._failed.append(Finished(ticket, 0.0, f"{type(error).__name__}: {error}"))
        return ticket

    def poll(self) -> list[Finished]:
        finished, self._failed = self._failed, []
        for lane in self.lanes.values():
            while lane.in_flight and lane.in_flight[0].is_over:
                copy = lane.in_flight.popleft()
                seconds = copy.started.elapsed_time(copy.copied) / 1e3
                finished.append(Finished(copy.ticket, seconds, None))
                self._free_events[True] += (copy.started, copy.copied)
                self._free_events[False].append(copy.touched)
        return finished

    def release(self, ticket: Ticket) -> bool:
        in_flight = self.lanes[ticket.direction].in_flight
        place = next((n for n, copy in enumerate(in_flight) if copy.ticket is ticket), None)
        if place is None:
            return not any(failed.ticket is ticket for failed in self._failed)
        if in_flight[place].touched.query():
            return True
        if place >= _RING:  # its staging buffer is still in use by a copy before it
            return False
        if "reuse" not in self._omit:
            self._engine_stream.wait_event(in_flight[place].touched)
            self.lanes[Direction.LOAD].pool_stream.wait_event(in_flight[place].touched)
        return True

    def forward_launched(self) -> None:
        self._forward_done.record(self._engine_stream)

    def digests(self, run: Run) -> list[int]:
        return host.digests(self.table, run)

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.synchronize()
        _unpin(self.table)

    @property
    def _engine_stream(self) -> torch.cuda.Stream:
        return self._forward_stream or torch.cuda.current_stream(self._rows.device)

    def _event(self, *, timed: bool = False) -> torch.cuda.Event:
        free = self._free_events[timed]
        return free.pop() if free else torch.cuda.Event(enable_timing=timed)

    def _start(self, lane: _Lane, ticket: Ticket, slots: Sequence[Slots], runs: Sequence[Run]) -> None:
        if self._fault is not None:
            self._fault(ticket.direction, runs)
        indices = self._rows.indices(slots)
        assert len(indices) == ticket.tokens <= self.chunk_tokens
        copy = _Copy(ticket, indices, self._event(timed=True), self._event(timed=True), self._event())
        self._wait_for_engine(lane)
        if ticket.direction is Direction.WRITE:
            self._write(lane, copy, runs)
        else:
            self._load(lane, copy, runs)
        lane.in_flight.append(copy)

    def _wait_for_engine(self, lane: _Lane) -> None:
        """What touches the pool now comes after the launched forward passes, and after the indices."""
        lane.indices_made.record(torch.cuda.current_stream(self._rows.device))
        if "indices" not in self._omit:
            lane.pool_stream.wait_event(lane.indices_made)
        if "forward" not in self._omit:
            lane.pool_stream.wait_event(self._forward_done)

    def _write(self, lane: _Lane, copy: _Copy, runs: Sequence[Run]) -> None:
        staging, drained = lane.next_staging()
        with torch.cuda.stream(lane.pool_stream):
            if "staging" not in self._omit:
                lane.pool_stream.wait_event(drained)
            self._mover.gather(copy.indices, staging[: copy.ticket.tokens])
            copy.touched.record(lane.pool_stream)
        with torch.cuda.stream(lane.link_stream):
            lane.link_stream.wait_event(copy.touched)
            copy.started.record(lane.link_stream)
            for run, rows in _with_rows(runs, staging):
                self.table[run.row : run.row + run.tokens].copy_(rows, non_blocking=True)
            copy.copied.record(lane.link_stream)
            drained.record(lane.link_stream)

    def _load(self, lane: _Lane, copy: _Copy, runs: Sequence[Run]) -> None:
        staging, drained = lane.next_staging()
        with torch.cuda.stream(lane.link_stream):
            if "staging" not in self._omit:
                lane.link_stream.wait_event(drained)
            copy.started.record(lane.link_stream)
            for run, rows in _with_rows(runs, staging):
                rows.copy_(self.table[run.row : run.row + run.tokens], non_blocking=True)
            copy.copied.record(lane.link_stream)
        with torch.cuda.stream(lane.pool_stream):
            lane.pool_stream.wait_event(copy.copied)
            self._mover.scatter(copy.indices, staging[: copy.ticket.tokens])
            copy.touched.record(lane.pool_stream)
            drained.record(lane.pool_stream)


def _with_rows(runs: Sequence[Run], staging: torch.Tensor) -> list[tuple[Run, torch.Tensor]]:
    """Each run with its rows of the staging buffer."""
    pairs, done = [], 0
    for run in runs:
        pairs.append((run, staging[done : done + run.tokens]))
        done += run.tokens
    return pairs


def _mover(rows: PoolRows, *, fused: bool) -> _Mover:
    """The kernel over all layers, compiled now and not while serving; torch's own where that fails."""
    if not fused or rows.word is not torch.int64:
        return rows
    try:
        from tokenflow_engine.kv.transfer.fused import FusedRows

        mover, slot = FusedRows(rows), torch.zeros(1, dtype=torch.int64, device=rows.device)
        row = torch.empty((1, rows.words), dtype=rows.word, device=rows.device)
        mover.gather(slot, row)
        mover.scatter(slot, row)  # slot 0 is for padding: SGLang gives it to nobody
        torch.cuda.synchronize(rows.device)
    except Exception as error:  # noqa: BLE001 - no Triton, no C compiler, ...: the slower way does as well
        _logger.warning("TokenFlow: KV is moved layer by layer, with more work for the scheduler: %s", error)
        return rows
    return mover


def _pin(table: torch.Tensor) -> None:
    """Lock the table's memory for the device.

    Not with torch's own allocator of pinned memory, which rounds up to a power of two.
    """
    size = table.numel() * table.element_size()
    code = torch.cuda.cudart().cudaHostRegister(table.data_ptr(), size, 0)
    if int(code) != 0:
        raise HostMemoryError(
            f"{size / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {int(code)}); "
            "make the host pool smaller, or raise the limit on locked memory (ulimit -l)"
        )


def _unpin(table: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(table.data_ptr())
