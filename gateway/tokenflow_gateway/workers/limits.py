"""Limits of a gateway with several workers and no Redis: the first worker counts for all.

Each of the others keeps count of its own requests beside that. Without the first one it goes on with its
share of every limit, by that count; and the first one's successor hears which of them are open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

import structlog

from tokenflow_gateway.tenants.limits import Lease, LocalLimits, Subject, Verdict
from tokenflow_gateway.workers.peers import Began, Held, Peers, Question, Settle, Take, Unreachable
from tokenflow_gateway.workers.worker import Worker

__all__ = ["WorkerLimits"]

_log = structlog.stdlib.get_logger("tokenflow.workers")

_FIRST: Final = 0
_TRIES: Final = 3
"""For the end of a request to be told: until then it counts as open."""

T = TypeVar("T")


class WorkerLimits:
    """A `LimitStore`, in each of the workers."""

    def __init__(self, worker: Worker, peers: Peers, local: LocalLimits) -> None:
        self._worker = worker
        self._is_first = worker.index == _FIRST
        self._peers = peers
        self._local = local
        self._held: dict[str, Lease] = {}
        """Of open requests; not of the first worker, whom nobody asks for them."""
        self._ended: set[str] | None = None
        """Of requests that have ended while the first worker, at its beginning, asks which are open."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """In the place of a predecessor that may have died: the others have to answer, and be answered."""
        if not self._is_first:
            await self._ask(_FIRST, Began(self._worker.index), bool)
            return
        self._ended = set()
        await asyncio.gather(*(self._learn(index) for index in range(1, self._worker.count)))
        self._ended = None

    def answer(self, question: Take | Settle | Began | Held) -> Verdict | list[Lease] | bool:
        """What another worker wants to know."""
        if isinstance(question, Take):
            return self._local.take_now(question.subjects, lease_id=question.lease_id, tokens=question.tokens)
        if isinstance(question, Held):
            return list(self._held.values())
        if isinstance(question, Settle):
            self._local.settle(question.lease, question.tokens)
            if self._ended is not None:
                self._ended.add(question.lease.id)
        else:
            self._local.end_all(_prefix(question.index))
        return True

    async def take(self, subjects: Sequence[Subject], *, lease_id: str, tokens: int) -> Verdict:
        if self._is_first:
            return self._local.take_now(subjects, lease_id=lease_id, tokens=tokens)
        lease_id = _prefix(self._worker.index) + lease_id
        try:
            verdict = await self._peers.ask(_FIRST, Take(list(subjects), lease_id, tokens), Verdict)
        except asyncio.CancelledError:
            self._give_back(subjects, lease_id, tokens)
            raise
        except Unreachable as error:
            if not error.gone:
                self._give_back(subjects, lease_id, tokens)
            processes = self._worker.count
            verdict = self._local.take_now(subjects, lease_id=lease_id, tokens=tokens, processes=processes)
        else:
            if verdict.lease is not None:
                self._local.record(verdict.lease)
        if verdict.lease is not None:
            self._held[lease_id] = verdict.lease
        return verdict

    def settle(self, lease: Lease, tokens: int | None) -> None:
        self._local.settle(lease, tokens)
        if self._held.pop(lease.id, None) is not None:
            self._spawn(self._tell(Settle(lease, tokens)))

    async def aclose(self) -> None:
        """Wait until the ends of all requests are told, or cannot be."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _learn(self, index: int) -> None:
        """Which requests another worker has, those excepted that have ended since it said so."""
        held = await self._ask(index, Held(), list[Lease])
        assert self._ended is not None
        for lease in held or ():
            if lease.id not in self._ended:
                self._local.restore(lease)

    def _give_back(self, subjects: Sequence[Subject], lease_id: str, tokens: int) -> None:
        """What the first worker may have given, or may yet give, to who does not wait for it any more."""
        lease = Lease(lease_id, tuple(subjects), tokens, time.time())
        self._spawn(self._tell(Settle(lease, 0)))

    async def _tell(self, end: Settle) -> None:
        """If the first worker does not run, what it had counted is gone with it."""
        await self._ask(_FIRST, end, bool)

    async def _ask(self, index: int, question: Question, answer: type[T]) -> T | None:
        """None if that worker does not run."""
        for _ in range(_TRIES):
            try:
                return await self._peers.ask(index, question, answer)
            except Unreachable as error:
                if error.gone:
                    return None
        _log.warning("a worker does not answer", index=index, question=type(question).__name__)
        return None

    def _spawn(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(telling)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _prefix(index: int) -> str:
    """Of the leases of one worker."""
    return f"{index}/"
