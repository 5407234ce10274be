"""Limits of a gateway with several workers and no Redis: the first worker counts for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

import structlog

from tokenflow_gateway.tenants.limits import Lease, LocalLimits, Subject, Verdict, share_of
from tokenflow_gateway.workers.peers import Began, Peers, Settle, Take, Unreachable
from tokenflow_gateway.workers.worker import Worker

__all__ = ["WorkerLimits", "answer_limits"]

_log = structlog.stdlib.get_logger("tokenflow.workers")

_FIRST: Final = 0
_TRIES: Final = 3
"""For the end of a request to be told: until then it counts as open."""


def answer_limits(limits: LocalLimits, question: Take | Settle | Began) -> Verdict | bool:
    """What the first worker answers."""
    if isinstance(question, Take):
        return limits.take_now(question.subjects, lease_id=question.lease_id, tokens=question.tokens)
    if isinstance(question, Settle):
        limits.settle(question.lease, question.tokens)
    else:
        limits.end_all(_prefix(question.index))
    return True


class WorkerLimits:
    """A `LimitStore`. While the first worker does not answer, each takes its share of every limit."""

    def __init__(self, worker: Worker, peers: Peers, local: LocalLimits) -> None:
        self._worker = worker
        self._peers = peers
        self._local = local
        self._alone: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """The open requests of a predecessor of this worker are over."""
        if self._worker.index != _FIRST:
            await self._tell(Began(self._worker.index))

    async def take(self, subjects: Sequence[Subject], *, lease_id: str, tokens: int) -> Verdict:
        if self._worker.index == _FIRST:
            return self._local.take_now(subjects, lease_id=lease_id, tokens=tokens)
        lease_id = _prefix(self._worker.index) + lease_id
        try:
            return await self._peers.ask(_FIRST, Take(list(subjects), lease_id, tokens), Verdict)
        except asyncio.CancelledError:
            self._give_back(subjects, lease_id, tokens)
            raise
        except Unreachable as error:
            if not error.gone:
                self._give_back(subjects, lease_id, tokens)
            return self._take_alone(subjects, lease_id, tokens)

    def settle(self, lease: Lease, tokens: int | None) -> None:
        if self._worker.index == _FIRST or lease.id in self._alone:
            self._alone.discard(lease.id)
            self._local.settle(lease, tokens)
        else:
            self._spawn(self._tell(Settle(lease, tokens)))

    async def aclose(self) -> None:
        """Wait until the ends of all requests are told, or cannot be."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _give_back(self, subjects: Sequence[Subject], lease_id: str, tokens: int) -> None:
        """What the first worker may have given, or may yet give, to who does not wait for it any more."""
        lease = Lease(lease_id, tuple(subjects), tokens, time.time())
        self._spawn(self._tell(Settle(lease, 0)))

    def _take_alone(self, subjects: Sequence[Subject], lease_id: str, tokens: int) -> Verdict:
        shares = [Subject(name, share_of(limits, self._worker.count)) for name, limits in subjects]
        verdict = self._local.take_now(shares, lease_id=lease_id, tokens=tokens)
        if verdict.lease is not None:
            self._alone.add(lease_id)
            verdict = replace(verdict, lease=verdict.lease._replace(subjects=tuple(subjects)))
        return verdict

    async def _tell(self, question: Settle | Began) -> None:
        for _ in range(_TRIES):
            try:
                await self._peers.ask(_FIRST, question, bool)
            except Unreachable as error:
                if error.gone:
                    return  # and what it had counted with it
            else:
                return
        _log.warning("the first worker was not told", of=type(question).__name__)

    def _spawn(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(telling)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _prefix(index: int) -> str:
    """Of the leases of one worker."""
    return f"{index}/"
