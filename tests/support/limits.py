"""Limits of a gateway in a fleet, without the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

from support.redis_server import RedisServer
from tokenflow_gateway.store.redis import FleetStore
from tokenflow_gateway.store.settings import RedisSettings
from tokenflow_gateway.store.shared_limits import SharedLimits
from tokenflow_gateway.tenants.budgets import Spent
from tokenflow_gateway.tenants.limits import LimitStore, LocalLimits, Subject, Verdict, period_of

__all__ = ["Replica", "fleet", "take", "until_free"]

_ids = count()


class Replica:
    """One gateway's limits in a fleet."""

    def __init__(self, server: RedisServer, name: str, *, processes: int = 1) -> None:
        self.record: list[Spent] | None = []
        """What it finds in the record of usage; None if it cannot be read."""
        self.store = FleetStore(RedisSettings(url=server.url), name)
        self.limits = SharedLimits(self.store, LocalLimits(), recorded=self.recorded, processes=processes)

    async def recorded(self) -> list[Spent] | None:
        return self.record

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Replica]:
        await self.store.start()
        tasks = [asyncio.create_task(self.store.run()), asyncio.create_task(self.limits.run())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def spent(self, subject: Subject) -> int:
        """By all, as Redis has it."""
        period, _ = period_of(subject.limits.budget_period, time.time())
        key = self.store.key("limits", subject.name, f"spent:{period}")
        return int(await self.store.client.hget(key, "total") or 0)

    async def until_up(self) -> None:
        async with asyncio.timeout(10):
            while not self.store.up:  # noqa: ASYNC110 - it has no event for tests
                await asyncio.sleep(0.01)

    async def until_back(self) -> None:
        """After Redis has gone for the first time."""
        async with asyncio.timeout(10):
            while self.store.lost == 0:  # noqa: ASYNC110 - it has no event for tests
                await asyncio.sleep(0.01)
        await self.until_up()


@asynccontextmanager
async def fleet(server: RedisServer, size: int) -> AsyncIterator[list[Replica]]:
    replicas = [Replica(server, f"replica-{index}") for index in range(size)]
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.running())
        for replica in replicas:  # each has seen all
            await replica.store._join(replica.store.client)
        yield replicas


async def take(store: LimitStore, *subjects: Subject, tokens: int = 0) -> Verdict:
    return await store.take(subjects, lease_id=f"lease-{next(_ids)}", tokens=tokens)


async def until_free(store: LimitStore, subject: Subject, tokens: int = 0) -> Verdict:
    """Settlements reach Redis in the background."""
    async with asyncio.timeout(5):
        while (verdict := await take(store, subject, tokens=tokens)).lease is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return verdict
