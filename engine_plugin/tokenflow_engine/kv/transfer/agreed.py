"""Copies of one rank that count when they are over on all: so that all ranks decide alike, in the same step.

Each rank copies its own shard of the KV, at its own speed. What `OffloadManager` decides rests on when copies
finish, on whether they failed, and on how long they took; here the ranks agree on all three, by one reduction
of a few integers a step. While nothing is in flight there is nothing to agree on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

from tokenflow_engine.kv.transfer.base import Direction, Finished, Run, Slots, Ticket, Transfer

__all__ = ["FAILED", "AgreedTransfer", "Lowest"]

_logger = logging.getLogger(__name__)

Lowest = Callable[[list[int]], list[int]]
"""The lowest of what the ranks give, place by place; each rank calls it as often as the others, with lists of
the same length. Raises if not all of them answer in time."""

_IN_FLIGHT = -(1 << 62)
FAILED = -(1 << 61)
"""A copy that failed: lower than minus the microseconds that it takes, which stand for one that went well."""
_LOST = -1
_FIRST_PACE_S = 0.03


class AgreedTransfer:
    """A backend like any other, over that of this rank. Every rank must call its methods in the same order.

    A copy that fails on one rank has failed on all, and takes as long as on the slowest. When the ranks
    cannot agree any more, every copy fails from then on, and streams are recomputed.
    """

    def __init__(self, transfer: Transfer, lowest: Lowest) -> None:
        self._transfer = transfer
        self._lowest = lowest
        self.host_tokens = transfer.host_tokens
        self.bytes_per_token = transfer.bytes_per_token
        self.chunk_tokens = transfer.chunk_tokens
        self.assumed_bytes_per_s = transfer.assumed_bytes_per_s
        self.is_lost = False
        """Whether the ranks have ceased to agree."""
        self._submitted: dict[Direction, deque[Ticket]] = {direction: deque() for direction in Direction}
        """Not agreed on yet, the oldest first."""
        self._over: dict[Ticket, Finished] = {}
        """Of these, what is over here."""
        self._pace_us = self._common_pace_us = int(_FIRST_PACE_S * 1e6)

    def submit(self, direction: Direction, slots: Sequence[Slots], runs: Sequence[Run]) -> Ticket:
        try:
            if self.is_lost:
                raise RuntimeError("the ranks do not agree any more")
            ticket = self._transfer.submit(direction, slots, runs)
        except Exception as error:  # noqa: BLE001 - it fails here, and so it must on the other ranks
            ticket = Ticket(direction, sum(run.tokens for run in runs))
            self._over[ticket] = Finished(ticket, 0.0, f"{type(error).__name__}: {error}")
        self._submitted[direction].append(ticket)
        return ticket

    def poll(self) -> list[Finished]:
        """What is over on all ranks. Waits for the slowest rank to come to this step, not for its copies."""
        if not any(self._submitted.values()):
            return []
        verdicts = self._agree(list(chain.from_iterable(self._submitted.values())))
        finished = []
        for queue in self._submitted.values():
            while queue and verdicts[queue[0]] != _IN_FLIGHT:
                ticket = queue.popleft()
                finished.append(self._verdict(ticket, verdicts[ticket]))
        return finished

    def release(self, ticket: Ticket) -> bool:
        """False: how far this rank has come says nothing of the others."""
        return False

    def forward_launched(self) -> None:
        if not self.is_lost:
            self._transfer.forward_launched()

    def digests(self, run: Run) -> list[int]:
        """Of this rank's shard alone."""
        return self._transfer.digests(run)

    def close(self) -> None:
        if not self.is_lost:
            self._transfer.close()

    def common_s(self, seconds: float) -> float:
        """A time that each rank measures for itself, as all know it: the least, when they last agreed."""
        self._pace_us = int(seconds * 1e6)
        return self._common_pace_us / 1e6

    def _agree(self, tickets: list[Ticket]) -> dict[Ticket, int]:
        if not self.is_lost:
            self._look()
            mine = [_LOST if self.is_lost else self._pace_us, *(self._state(ticket) for ticket in tickets)]
            try:
                pace, *states = self._lowest(mine)
            except Exception as error:  # noqa: BLE001 - a rank that does not answer costs the copies alone
                self._lose(error)
            else:
                if pace != _LOST:
                    self._common_pace_us = pace
                    return dict(zip(tickets, states, strict=True))
                if not self.is_lost:
                    self._lose("another rank cannot go on")
        return dict.fromkeys(tickets, FAILED)

    def _look(self) -> None:
        try:
            self._over |= {done.ticket: done for done in self._transfer.poll()}
        except Exception as error:  # noqa: BLE001 - the other ranks are to know, and are waiting
            self._lose(error)

    def _state(self, ticket: Ticket) -> int:
        done = self._over.get(ticket)
        if done is None:
            return _IN_FLIGHT
        return FAILED if done.error is not None else -int(done.seconds * 1e6)

    def _verdict(self, ticket: Ticket, state: int) -> Finished:
        here = self._over.pop(ticket, None)
        if state == FAILED:
            reason = here.error if here is not None else None
            return Finished(ticket, 0.0, reason or "it failed on another rank")
        return Finished(ticket, -state / 1e6, None)

    def _lose(self, why: object) -> None:
        """No copy may be under way here when the streams they were for go on."""
        self.is_lost = True
        _logger.error("TokenFlow: KV is not moved to host memory any more, the ranks do not agree: %s", why)
        self._transfer.close()
