"""Limits of a gateway with several workers: the first one counts for all."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

from tokenflow_gateway.tenants.limits import Lease, LocalLimits, Subject, Verdict
from tokenflow_gateway.tenants.model import Limits
from tokenflow_gateway.workers.limits import WorkerLimits
from tokenflow_gateway.workers.peers import Held, Peers, PeerServer, Question
from tokenflow_gateway.workers.worker import Worker

_ids = count()
T = TypeVar("T")


class Process:
    """One worker's limits."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.local = LocalLimits()
        self.limits = WorkerLimits(worker, Peers(worker), self.local)

    def answer(self, question: Question) -> Verdict | list[Lease] | bool:
        return self.limits.answer(question)  # type: ignore[arg-type]  # no other questions here

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with PeerServer(self.worker, self.answer).listening():
            await self.limits.begin()
            yield


@asynccontextmanager
async def crew(size: int = 3) -> AsyncIterator[list[Process]]:
    """All run but the first, which the caller has to start."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        processes = [Process(worker) for worker in Worker.crew(size, Path(folder))]
        async with AsyncExitStack() as stack:
            for process in processes[1:]:
                await stack.enter_async_context(process.serving())
            yield processes
            for process in processes:
                await process.limits.aclose()


async def take(process: Process, subject: Subject, tokens: int = 0) -> Verdict:
    return await process.limits.take([subject], lease_id=f"l{next(_ids)}", tokens=tokens)


async def test_workers_together_let_through_exactly_what_is_allowed() -> None:
    subject = Subject("tenant:a", Limits(requests_per_minute=50))
    async with crew() as processes, processes[0].serving():
        asked = (take(processes[0 if index < 10 else 1], subject) for index in range(120))
        verdicts = await asyncio.gather(*asked)
        assert sum(verdict.lease is not None for verdict in verdicts) == 50


async def test_an_end_is_told_to_who_counts() -> None:
    subject = Subject("tenant:a", Limits(concurrent_streams=1, tokens_per_minute=100))
    async with crew() as (first, second, third), first.serving():
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
    async with crew() as (first, second, third), first.serving():
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
    async with crew() as (first, second, third), first.serving():
        await take(second, subject)
        await take(third, subject)
        assert (await take(third, subject)).kind == "streams"
        await Process(second.worker).limits.begin()
        assert (await take(third, subject)).lease
        assert (await take(third, subject)).kind == "streams"  # the third's own goes on


async def test_without_the_first_each_has_its_share() -> None:
    subject = Subject("tenant:a", Limits(requests_per_minute=30))
    async with crew() as (_first, second, third):
        verdicts = [await take(second, subject) for _ in range(20)]
        leases = [verdict.lease for verdict in verdicts if verdict.lease is not None]
        assert len(leases) == 10
        for lease in leases:
            second.limits.settle(lease, None)
        assert second.local.statistics()["tenant:a"][2] == 0
        assert (await take(third, subject)).lease


async def test_what_one_has_from_the_first_is_of_its_share_when_that_is_gone() -> None:
    subject = Subject("tenant:a", Limits(concurrent_streams=6))
    async with crew() as (first, second, _third):
        async with first.serving():
            held = [(await take(second, subject)).lease for _ in range(3)]
        assert (await take(second, subject)).kind == "streams"
        for lease in held[:2]:
            assert lease is not None
            second.limits.settle(lease, None)
        assert (await take(second, subject)).lease


# ---- the first one dies --------------------------------------------------------------------------------


async def test_the_firsts_successor_hears_of_the_others_open_requests() -> None:
    subject = Subject("tenant:a", Limits(concurrent_streams=4, budget_tokens=1000))
    async with crew() as (first, second, third):
        async with first.serving():
            for process in (first, second, third):
                verdict = await take(process, subject, tokens=100)
            ended = await take(third, subject, tokens=100)
            assert ended.lease is not None
            third.limits.settle(ended.lease, None)
            await third.limits.aclose()
        alone = (await take(second, Subject("tenant:b", Limits(concurrent_streams=3)))).lease
        assert alone is not None, "nobody counted it but the second"
        successor = Process(first.worker)
        async with successor.serving():
            assert _open(successor) == {"tenant:a": 2, "tenant:b": 1}
            assert [(await take(successor, subject)).kind for _ in range(3)] == [None, None, "streams"]
            assert verdict.lease is not None
            third.limits.settle(verdict.lease, 850)  # far more than was thought
            second.limits.settle(alone, None)
            for process in (second, third):
                await process.limits.aclose()
            assert _open(successor) == {"tenant:a": 3, "tenant:b": 0}
            assert (await take(successor, subject, tokens=51)).kind == "budget", "850 and 100 are spent"
            assert (await take(successor, subject, tokens=50)).lease
            assert (await take(second, subject)).kind == "streams"


async def test_a_request_that_ends_while_the_successor_begins_is_over() -> None:
    subject = Subject("tenant:a", Limits(concurrent_streams=1))
    async with crew() as (first, second, third):
        async with first.serving():
            lease = (await take(second, subject)).lease
        assert lease is not None

        class Late(Peers):
            """What it hears of open requests is no more so."""

            async def ask(self, index: int, question: Question, answer: type[T]) -> T:
                heard = await super().ask(index, question, answer)
                if isinstance(question, Held) and index == second.worker.index:
                    second.limits.settle(lease, None)
                    await second.limits.aclose()
                return heard

        successor = Process(first.worker)
        successor.limits = WorkerLimits(first.worker, Late(first.worker), successor.local)
        async with successor.serving():
            assert _open(successor) == {"tenant:a": 0}
            assert (await take(third, subject)).lease


def _open(process: Process) -> dict[str, int]:
    return {name: held for name, (_, _, held) in process.local.statistics().items()}
