"""What a backend that moves KV does. `OffloadManager` talks to no other part of it.

The host pool is a table with one row a token: all layers' K and V of this token side by side. A backend
copies between slots of the device's pool and rows of this table, knows neither streams nor pages, and
completes the copies of one direction in the order in which they were submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

__all__ = ["Direction", "Finished", "HostMemoryError", "Run", "Slots", "Ticket", "Transfer", "TransferFault"]

Slots = Any
"""Slots of the device's pool in token order: a one-dimensional integer tensor, on the pool's device or
not."""


class HostMemoryError(RuntimeError):
    """The machine cannot give the host pool the memory that was asked for."""


class Direction(IntEnum):
    WRITE = 0
    """Device to host."""
    LOAD = 1
    """Host to device."""


class Run(NamedTuple):
    """Adjacent rows of the host table."""

    row: int
    tokens: int


TransferFault = Callable[[Direction, Sequence[Run]], None]
"""For tests: called as a copy starts; what it raises is how this copy fails."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One submitted copy. Identity is what counts."""

    direction: Direction
    tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A copy that touches neither side any more."""

    ticket: Ticket
    seconds: float
    """That the copy itself took, without waiting for its turn."""
    error: str | None
    """None if every byte was copied; otherwise the target's content is undefined."""


class Transfer(Protocol):
    """Moves rows. For one thread, but for the backend's own; only `close` and, briefly, `release` wait."""

    host_tokens: int
    """Rows of the host table."""
    bytes_per_token: int
    chunk_tokens: int
    """The most that one copy may have."""
    assumed_bytes_per_s: float
    """Until something was measured."""

    def submit(self, direction: Direction, slots: Sequence[Slots], runs: Sequence[Run]) -> Ticket:
        """Start one copy between these slots, the parts one after another, and these rows, in that order.

        The slots may change once this has returned. A write sees all that forward passes launched before the
        last `forward_launched` have written, and a load does not overwrite what they still read. Failures
        come with `poll`.
        """
        ...

    def poll(self) -> list[Finished]:
        """What has finished since the last call."""
        ...

    def release(self, ticket: Ticket) -> bool:
        """Whether the pool's slots of this copy, and of those before it in its direction, may be reused now.

        On a GPU that can be before it has `Finished`: forward passes launched and loads submitted from now on
        are put behind its work on the pool, if that is about to run; they are not made to wait for the link.
        On a CPU a short copy is waited for, two milliseconds at most. Never for one that failed and that
        `poll` has not told of.
        """
        ...

    def forward_launched(self) -> None:
        """A forward pass was launched just now; copies submitted from now on come after it."""
        ...

    def digests(self, run: Run) -> list[int]:
        """A checksum of each of these host rows. Blocks; for tests."""
        ...

    def close(self) -> None:
        """Let copies in flight finish and give the host pool back."""
        ...
