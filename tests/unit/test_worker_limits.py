"""Limits of a gateway with several workers: the first one counts for all."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from tokenflow_gateway.tenants.limits import LocalLimits, Subject, Verdict
from tokenflow_gateway.tenants.model import Limits
from tokenflow_gateway.workers.limits import WorkerLimits, answer_limits
from tokenflow_gateway.workers.peers import Peers, PeerServer, Question
from tokenflow_gateway.workers.worker import Worker

_ids = count()


class Process:
    """One worker's limits."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.local = LocalLimits()
        self.limits = WorkerLimits(worker, Peers(worker), self.local)

    def answer(self, question: Question) -> Verdict | bool:
        return answer_limits(self.local, question)  # type: ignore[arg-type]  # no other questions here

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        task = asyncio.create_task(PeerServer(self.worker, self.answer).run())
        async with asyncio.timeout(5):
            while not self.worker.socket(self.worker.index).exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def crew(size: int = 3) -> AsyncIterator[list[Process]]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        processes = [Process(worker) for worker in Worker.crew(size, Path(folder))]
        async with processes[0].serving():
            yield processes


async def take(process: Process, subject: Subject, tokens: int = 0) -> Verdict:
    return await process.limits.take([subject], lease_id=f"l{next(_ids)}", tokens=tokens)


async def test_workers_together_let_through_exactly_what_is_allowed() -> None:
    subject = Subject("tenant:a", Limits(requests_per_minute=50))
    async with crew() as processes:
        asked = (take(processes[0 if index < 10 else 1], subject) for index in range(120))
        verdicts = await asyncio.gather(*asked)
        assert sum(verdict.lease is not None for verdict in verdicts) == 50


async def test_an_end_is_told_to_who_counts() -> None:
    subject = Subject("tenant:a", Limits(concurrent_streams=1, tokens_per_minute=100))
    async with crew() as (first, second, third):
        taken = await take(second, subject, tokens=90)
        assert taken.lease is not None
        assert (await take(third, subject)).kind == "streams"
        second.limits.settle(taken.lease, 10)
        await second.limits.aclose()
        verdict = await take(first, subject, tokens=90)
        assert verdict.lease is not None
        assert verdict.tokens is not None
        assert verdict.tokens.remaining == 0


async def test_what_a_request_is_given_that_has_left_meanwhile_is_given_back() -> None:
    subject = Subject("tenant:a", Limits(concurrent_streams=1))
    async with crew() as (first, second, third):
        taking = asyncio.create_task(take(second, subject))
        async with asyncio.timeout(5):
            while not first.local.statistics():  # noqa: ASYNC110 - a step of the loop at a time
                await asyncio.sleep(0)
        assert not taking.done(), "its answer is still on the way"
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert taking.cancelled()
        await second.limits.aclose()
        assert first.local.statistics()["tenant:a"][2] == 0
        assert (await take(third, subject)).lease


async def test_the_requests_of_a_worker_that_died_are_over_when_its_successor_begins() -> None:
    subject = Subject("tenant:a", Limits(concurrent_streams=2))
    async with crew() as (_first, second, third):
        await take(second, subject)
        await take(third, subject)
        assert (await take(third, subject)).kind == "streams"
        await Process(second.worker).limits.begin()
        assert (await take(third, subject)).lease
        assert (await take(third, subject)).kind == "streams"  # the third's own goes on


async def test_without_the_first_each_has_its_share() -> None:
    subject = Subject("tenant:a", Limits(requests_per_minute=30))
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        _first, second, third = (Process(worker) for worker in Worker.crew(3, Path(folder)))
        verdicts = [await take(second, subject) for _ in range(20)]
        leases = [verdict.lease for verdict in verdicts if verdict.lease is not None]
        assert len(leases) == 10
        for lease in leases:
            second.limits.settle(lease, None)
        assert second.local.statistics()["tenant:a"][2] == 0
        assert (await take(third, subject)).lease
