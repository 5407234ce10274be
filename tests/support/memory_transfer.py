"""A KV backend over lists, whose copies happen one by one when the test says so, or fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from tokenflow_engine.kv.transfer.base import Direction, Finished, Run, Ticket

__all__ = ["MemoryTransfer"]


class MemoryTransfer:
    """`device` and `host` hold one value a token. A copy reads its source when it is finished, not before.

    With `ordered`, it lets slots be reused before, as a GPU may: it then runs the copy at once in `release`.
    """

    bytes_per_token = 1000
    assumed_bytes_per_s = 1e6

    def __init__(self, *, slots: int, host_tokens: int, chunk_tokens: int = 8, ordered: bool = False) -> None:
        self.device: list[Any] = [None] * slots
        self.host: list[Any] = [None] * host_tokens
        self.host_tokens = host_tokens
        self.chunk_tokens = chunk_tokens
        self.ordered = ordered
        self.closed = False
        self._in_flight: dict[Direction, deque[tuple[Ticket, list[int], list[int]]]] = {
            direction: deque() for direction in Direction
        }
        self._moved: set[Ticket] = set()
        self._finished: list[Finished] = []

    def submit(self, direction: Direction, slots: Sequence[Sequence[int]], runs: Sequence[Run]) -> Ticket:
        flat = [slot for part in slots for slot in part]
        rows = [run.row + n for run in runs for n in range(run.tokens)]
        assert len(flat) == len(rows) <= self.chunk_tokens
        assert len(set(rows)) == len(rows)
        ticket = Ticket(direction, len(flat))
        self._in_flight[direction].append((ticket, flat, rows))
        return ticket

    def in_flight(self, direction: Direction) -> int:
        return len(self._in_flight[direction])

    def finish(self, direction: Direction, *, error: str | None = None) -> None:
        """Let the oldest copy of this direction happen, or fail."""
        ticket, slots, rows = self._in_flight[direction].popleft()
        if error is None and ticket not in self._moved:
            self._move(direction, slots, rows)
        self._moved.discard(ticket)
        self._finished.append(Finished(ticket, ticket.tokens / 1000, error))

    def finish_all(self) -> None:
        for direction in Direction:
            while self._in_flight[direction]:
                self.finish(direction)

    def poll(self) -> list[Finished]:
        finished, self._finished = self._finished, []
        return finished

    def release(self, ticket: Ticket) -> bool:
        if not self.ordered:
            return False
        for queued, slots, rows in self._in_flight[ticket.direction]:
            if queued not in self._moved:
                self._move(ticket.direction, slots, rows)
                self._moved.add(queued)
            if queued is ticket:
                break
        return True

    def forward_launched(self) -> None:
        pass

    def digests(self, run: Run) -> list[int]:
        return [hash(value) for value in self.host[run.row : run.row + run.tokens]]

    def close(self) -> None:
        self.closed = True

    def _move(self, direction: Direction, slots: Sequence[int], rows: Sequence[int]) -> None:
        for slot, row in zip(slots, rows, strict=True):
            if direction is Direction.WRITE:
                self.host[row] = self.device[slot]
            else:
                self.device[slot] = self.host[row]
