"""KV copies where the pool lies in main memory, so that an engine on a CPU runs the same code above them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from tokenflow_engine.kv.transfer import host
from tokenflow_engine.kv.transfer.base import Direction, Finished, Run, Slots, Ticket, TransferFault
from tokenflow_engine.kv.transfer.rows import PoolRows

__all__ = ["CpuTransfer"]

_CHUNK_BYTES = 1 << 20
_SHORT_S = 0.002
"""A copy of a stream's last tokens takes a fraction of this, and a step of the engine ten times as long."""
_GRAIN_WORDS = 32768
"""From so many elements on, torch spreads an operation over all cores, which the forward pass needs."""


@dataclass(slots=True)
class _Copy:
    ticket: Ticket
    indices: torch.Tensor
    runs: Sequence[Run]


class CpuTransfer:
    """One worker thread, on one core at most: torch lets go of the interpreter's lock while it copies.

    A chunk is few, long operations, because the thread must get that lock back after each. Reading is safe
    beside the forward pass, which writes other slots. Both directions take turns.

    `table`, the host table, is for tests to tamper with.
    """

    assumed_bytes_per_s = 5e8

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        host_tokens: int,
        chunk_bytes: int = _CHUNK_BYTES,
        fault: TransferFault | None = None,
    ) -> None:
        self._rows = PoolRows(buffers)
        self._fault = fault
        self.host_tokens = host_tokens
        self.bytes_per_token = self._rows.bytes_per_token
        widest = max(table.shape[1] for table in self._rows.tables)
        self.chunk_tokens = max(1, min(chunk_bytes // self.bytes_per_token, (_GRAIN_WORDS - 1) // widest))
        self._staging = torch.empty((self.chunk_tokens, self._rows.words), dtype=self._rows.word)
        self.table = host.host_table(host_tokens, self._rows.words, self._rows.word)
        self._queues: dict[Direction, deque[_Copy]] = {direction: deque() for direction in Direction}
        self._work = threading.Condition()
        self._closing = False
        self._finished: deque[Finished] = deque()
        self._worker = threading.Thread(target=self._run, name="tokenflow-kv", daemon=True)
        self._worker.start()

    def submit(self, direction: Direction, slots: Sequence[Slots], runs: Sequence[Run]) -> Ticket:
        indices = self._rows.indices(slots)
        ticket = Ticket(direction, sum(run.tokens for run in runs))
        assert len(indices) == ticket.tokens
        with self._work:
            self._queues[direction].append(_Copy(ticket, indices, runs))
            self._work.notify()
        return ticket

    def poll(self) -> list[Finished]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def release(self, ticket: Ticket) -> bool:
        """Whether it has been copied: nothing can be put behind it. If it is next, that is awaited briefly.

        False after a failure that `poll` has not told of yet.
        """
        with self._work:
            queue = self._queues[ticket.direction]
            if not any(copy.ticket is ticket for copy in islice(queue, 1, None)):
                self._work.wait_for(lambda: ticket in self._ended(ticket.direction), _SHORT_S)
            ended = self._ended(ticket.direction)
            return ticket in ended and not any(ended.values())

    def forward_launched(self) -> None:
        """Nothing: a forward pass on a CPU has finished when its launch returns."""

    def digests(self, run: Run) -> list[int]:
        return host.digests(self.table, run)

    def close(self) -> None:
        with self._work:
            self._closing = True
            self._work.notify()
        self._worker.join()

    def _run(self) -> None:
        turn = Direction.WRITE
        while (copy := self._next(turn)) is not None:
            turn = Direction(1 - copy.ticket.direction)
            started, error = time.perf_counter(), None
            try:
                self._copy(copy)
            except Exception as failure:  # noqa: BLE001 - whatever it was, this copy did not happen
                error = f"{type(failure).__name__}: {failure}"
            with self._work:
                self._finished.append(Finished(copy.ticket, time.perf_counter() - started, error))
                self._work.notify_all()

    def _ended(self, direction: Direction) -> dict[Ticket, str | None]:
        """Copies that `poll` has not told of yet, with their errors."""
        return {done.ticket: done.error for done in self._finished if done.ticket.direction is direction}

    def _next(self, turn: Direction) -> _Copy | None:
        """The next copy, of `turn`'s direction if there is one; None at the end, when nothing is left."""
        with self._work:
            while True:
                for direction in (turn, Direction(1 - turn)):
                    if self._queues[direction]:
                        return self._queues[direction].popleft()
                if self._closing:
                    return None
                self._work.wait()

    def _copy(self, copy: _Copy) -> None:
        direction = copy.ticket.direction
        if self._fault is not None:
            self._fault(direction, copy.runs)
        rows = torch.tensor([run.row + n for run in copy.runs for n in range(run.tokens)])
        staging = self._staging[: len(rows)]
        if direction is Direction.WRITE:
            self._rows.gather(copy.indices, staging)
            self.table.index_copy_(0, rows, staging)
        else:
            torch.index_select(self.table, 0, rows, out=staging)
            self._rows.scatter(copy.indices, staging)
