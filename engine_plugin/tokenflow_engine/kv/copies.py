"""Copies of one direction: those that wait for their turn, and those at the backend."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from tokenflow_engine.kv.rates import CopyRate
from tokenflow_engine.kv.transfer.base import Direction, Finished, Run, Slots, Ticket, Transfer

__all__ = ["CopyQueue", "Part"]

Owner = TypeVar("Owner")


@dataclass(slots=True)
class Part(Generic[Owner]):
    """Tokens ``[start, end)`` of one stream. `slots` holds those of the tokens from `origin` on."""

    owner: Owner
    start: int
    end: int
    slots: Slots
    origin: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


class CopyQueue(Generic[Owner]):
    """Cuts parts into chunks, joins small ones, and keeps no more at the backend than lasts `ahead_s`.

    More would delay what is urgent and could not be taken back; less would leave the link idle between two
    steps.
    """

    def __init__(self, transfer: Transfer, direction: Direction, *, ahead_s: float) -> None:
        self._transfer = transfer
        self._direction = direction
        self._ahead_s = ahead_s
        self._waiting: deque[Part[Owner]] = deque()
        self._in_flight: dict[Ticket, list[Part[Owner]]] = {}
        self._in_flight_tokens = 0
        self._waiting_tokens = 0
        self.rate = CopyRate(transfer.assumed_bytes_per_s)
        self.failed = 0
        """Copies that failed."""

    @property
    def tokens(self) -> int:
        """Waiting and in flight."""
        return self._waiting_tokens + self._in_flight_tokens

    def seconds(self, tokens: float) -> float:
        """Until `tokens` more are copied, behind all that is queued."""
        return (self.tokens + tokens) * self._transfer.bytes_per_token / self.rate.bytes_per_s

    def tokens_within(self, seconds: float) -> int:
        """How many tokens the link moves in this time."""
        return int(seconds * self.rate.bytes_per_s / self._transfer.bytes_per_token)

    def put(self, part: Part[Owner]) -> None:
        """Queue it behind the others."""
        self._waiting.append(part)
        self._waiting_tokens += part.tokens

    def cancel(self, owner: Owner) -> int:
        """Take out what waits of this owner; the tokens of it."""
        mine = [part for part in self._waiting if part.owner is owner]
        if mine:
            self._waiting = deque(part for part in self._waiting if part.owner is not owner)
        tokens = sum(part.tokens for part in mine)
        self._waiting_tokens -= tokens
        return tokens

    def is_waiting(self, owner: Owner) -> bool:
        return any(part.owner is owner for part in self._waiting)

    def last_in_flight(self, owner: Owner) -> Ticket | None:
        """The youngest copy at the backend with tokens of this owner; the others finish before it."""
        tickets = [t for t, parts in self._in_flight.items() if any(part.owner is owner for part in parts)]
        return tickets[-1] if tickets else None

    def next_chunk(self) -> list[Part[Owner]]:
        """What to submit now; empty if nothing waits or the backend has enough."""
        ahead = max(2 * self._transfer.chunk_tokens, self.tokens_within(self._ahead_s))
        room = min(self._transfer.chunk_tokens, ahead - self._in_flight_tokens)
        chunk: list[Part[Owner]] = []
        while self._waiting and room > 0:
            part = self._waiting[0]
            if part.tokens <= room:
                self._waiting.popleft()
            else:
                cut = part.start + room
                self._waiting[0] = Part(part.owner, cut, part.end, part.slots, part.origin)
                part = Part(part.owner, part.start, cut, part.slots, part.origin)
            chunk.append(part)
            room -= part.tokens
            self._waiting_tokens -= part.tokens
        return chunk

    def submit(self, chunk: list[Part[Owner]], runs: list[Run]) -> None:
        """Hand a chunk to the backend; `runs` are its host rows."""
        slots = [part.slots[part.start - part.origin : part.end - part.origin] for part in chunk]
        ticket = self._transfer.submit(self._direction, slots, runs)
        self._in_flight[ticket] = chunk
        self._in_flight_tokens += ticket.tokens

    def finish(self, finished: Finished) -> list[Part[Owner]]:
        """The backend has finished one: its parts."""
        tokens = finished.ticket.tokens
        self._in_flight_tokens -= tokens
        if finished.error is None:
            self.rate.add(tokens * self._transfer.bytes_per_token, finished.seconds)
        else:
            self.failed += 1
        return self._in_flight.pop(finished.ticket)
