"""Limits, by one suite over both stores: this process's and a fleet's in a real Redis."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from support.redis_server import RedisServer, needs_redis, redis_server
from tokenflow_gateway.store.redis import FleetStore
from tokenflow_gateway.store.settings import RedisSettings
from tokenflow_gateway.store.shared_limits import SharedLimits
from tokenflow_gateway.tenants.limits import LimitStore, LocalLimits, Subject, Verdict, period_of, subjects_of
from tokenflow_gateway.tenants.model import Limits, Principal, Tenant

_ids = count()


class Replica:
    """One gateway's limits in a fleet."""

    def __init__(self, server: RedisServer, name: str) -> None:
        self.store = FleetStore(RedisSettings(url=server.url), name)
        self.limits = SharedLimits(self.store, LocalLimits())

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

    async def until_up(self, up: bool = True) -> None:
        async with asyncio.timeout(10):
            while self.store.up is not up:  # noqa: ASYNC110 - it has no event for tests
                await asyncio.sleep(0.01)


@asynccontextmanager
async def fleet(server: RedisServer, size: int) -> AsyncIterator[list[Replica]]:
    replicas = [Replica(server, f"replica-{index}") for index in range(size)]
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.running())
        for replica in replicas:  # each has seen all
            await replica.store._join(replica.store.client)
        yield replicas


@pytest.fixture(params=["local", pytest.param("redis", marks=needs_redis)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LimitStore]:
    if request.param == "local":
        yield LocalLimits()
        return
    with redis_server(tmp_path) as server:
        async with fleet(server, 1) as (replica,):
            assert replica.store.up
            yield replica.limits


async def take(store: LimitStore, *subjects: Subject, tokens: int = 0) -> Verdict:
    return await store.take(subjects, lease_id=f"lease-{next(_ids)}", tokens=tokens)


async def until_free(store: LimitStore, subject: Subject, tokens: int = 0) -> Verdict:
    """Settlements reach Redis in the background."""
    async with asyncio.timeout(5):
        while (verdict := await take(store, subject, tokens=tokens)).lease is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return verdict


async def test_requests_of_a_minute_are_exact_when_they_come_at_once(store: LimitStore) -> None:
    subject = Subject("tenant:a", Limits(requests_per_minute=50))
    verdicts = await asyncio.gather(*(take(store, subject) for _ in range(120)))
    assert sum(verdict.lease is not None for verdict in verdicts) == 50
    refused = next(verdict for verdict in verdicts if verdict.lease is None)
    assert refused.kind == "requests"
    assert refused.subject == subject
    assert 58 < refused.retry_s <= 60.5
    assert refused.requests is not None
    assert (refused.requests.limit, refused.requests.remaining) == (50, 0)


async def test_others_are_not_counted(store: LimitStore) -> None:
    limits = Limits(requests_per_minute=1)
    assert (await take(store, Subject("tenant:a", limits))).lease
    assert (await take(store, Subject("tenant:b", limits))).lease
    assert (await take(store, Subject("tenant:a", limits))).lease is None


async def test_tokens_are_taken_as_estimated_and_settled_as_used(store: LimitStore) -> None:
    subject = Subject("tenant:a", Limits(tokens_per_minute=1000))
    first = await take(store, subject, tokens=900)
    assert first.lease is not None
    assert first.tokens is not None
    assert first.tokens.remaining == 100
    assert (await take(store, subject, tokens=200)).kind == "tokens"
    store.settle(first.lease, 300)
    second = await until_free(store, subject, tokens=700)
    assert second.tokens is not None
    assert second.tokens.remaining == 0
    assert second.lease is not None
    store.settle(second.lease, 1100)  # the estimate was too low
    assert (await take(store, subject, tokens=1)).kind == "tokens"


async def test_a_request_larger_than_the_limit_is_told_that_waiting_does_not_help(store: LimitStore) -> None:
    verdict = await take(store, Subject("tenant:a", Limits(tokens_per_minute=1000)), tokens=1001)
    assert verdict.kind == "tokens"
    assert verdict.retry_s == math.inf


async def test_streams_at_a_time_are_exact_and_given_back(store: LimitStore) -> None:
    subject = Subject("tenant:a", Limits(concurrent_streams=3))
    verdicts = await asyncio.gather(*(take(store, subject) for _ in range(10)))
    open_ones = [verdict.lease for verdict in verdicts if verdict.lease is not None]
    assert len(open_ones) == 3
    assert {verdict.kind for verdict in verdicts if verdict.lease is None} == {"streams"}
    store.settle(open_ones[0], None)
    store.settle(open_ones[0], None)  # once is enough
    await until_free(store, subject)
    assert (await take(store, subject)).kind == "streams"


async def test_a_budget_holds_for_its_period(store: LimitStore) -> None:
    subject = Subject("tenant:a", Limits(budget_tokens=1000, budget_period="day"))
    first = await take(store, subject, tokens=600)
    assert first.lease is not None
    refused = await take(store, subject, tokens=600)
    assert refused.kind == "budget"
    assert 0 < refused.retry_s <= 86_400
    store.settle(first.lease, 100)
    await until_free(store, subject, tokens=600)


async def test_a_refusal_by_one_takes_nothing_from_the_other(store: LimitStore) -> None:
    tenant = Subject("tenant:a", Limits(requests_per_minute=10))
    key = Subject("key:k", Limits(requests_per_minute=2))
    for _ in range(5):
        verdict = await take(store, tenant, key)
    assert verdict.subject == key
    left = await take(store, tenant)
    assert left.requests is not None
    assert left.requests.remaining == 7


def test_periods_end_at_midnight_of_utc_and_at_the_end_of_the_month() -> None:
    evening = 1_709_200_800.0  # 2024-02-29 10:00
    assert period_of("day", evening) == ("2024-02-29", 14 * 3600)
    assert period_of("month", evening) == ("2024-02", 14 * 3600)


def test_a_key_is_counted_beside_its_tenant_where_either_is_limited() -> None:
    limited = Limits(requests_per_minute=1)
    tenant = Tenant(name="a", limits=limited)
    assert subjects_of(Principal(tenant=tenant)) == (Subject("tenant:a", limited),)
    both = Principal(tenant=tenant, key_id="k", limits=limited)
    assert [subject.name for subject in subjects_of(both)] == ["tenant:a", "key:k"]
    assert subjects_of(Principal(tenant=Tenant(name="b"), key_id="k")) == ()


# ---- a fleet -------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


@needs_redis
async def test_replicas_together_let_through_exactly_what_is_allowed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine all of them at once may take longer than Redis is waited for."""
    monkeypatch.setattr("tokenflow_gateway.store.redis.ANSWER_WITHIN_S", 30.0)
    subject = Subject("tenant:a", Limits(requests_per_minute=300, tokens_per_minute=2_500))
    async with fleet(server, 3) as replicas:
        verdicts = await asyncio.gather(
            *(take(replicas[index % 3].limits, subject, tokens=10) for index in range(900))
        )
    assert all(replica.store.lost == 0 for replica in replicas)
    assert sum(verdict.lease is not None for verdict in verdicts) == 250


@needs_redis
async def test_separate_counts_would_let_more_through(server: RedisServer) -> None:
    """The negative control of the one before: the same load on stores that do not share."""
    subject = Subject("tenant:a", Limits(requests_per_minute=300, tokens_per_minute=2_500))
    alone = [LocalLimits() for _ in range(3)]
    verdicts = await asyncio.gather(*(take(alone[index % 3], subject, tokens=10) for index in range(900)))
    assert sum(verdict.lease is not None for verdict in verdicts) == 750


@needs_redis
async def test_without_redis_each_goes_on_with_its_share_and_tells_it_later(server: RedisServer) -> None:
    subject = Subject("tenant:a", Limits(requests_per_minute=100))
    async with fleet(server, 2) as replicas:
        server.kill()
        verdicts = await asyncio.gather(*(take(replicas[index % 2].limits, subject) for index in range(300)))
        assert sum(verdict.lease is not None for verdict in verdicts) == 100
        assert [replica.store.up for replica in replicas] == [False, False]
        server.start()
        for replica in replicas:
            await replica.until_up()
        assert (await take(replicas[0].limits, subject)).kind == "requests"
        assert [replica.store.lost for replica in replicas] == [1, 1]


@needs_redis
async def test_a_redis_that_has_forgotten_is_told_of_the_last_minute(server: RedisServer) -> None:
    requests = Subject("tenant:a", Limits(requests_per_minute=100))
    streams = Subject("tenant:b", Limits(concurrent_streams=2, budget_tokens=1000))
    async with fleet(server, 2) as replicas:
        for index in range(80):
            assert (await take(replicas[index % 2].limits, requests)).lease
        held = [(await take(replica.limits, streams, tokens=400)).lease for replica in replicas]
        server.kill()
        server.start()
        for replica in replicas:  # the very next request notices
            assert (await take(replica.limits, Subject("tenant:c", Limits()))).lease
            assert replica.store.lost == 1
        for replica in replicas:
            await replica.until_up()
        verdict = await take(replicas[1].limits, requests)
        assert verdict.requests is not None
        assert verdict.requests.remaining == 19
        assert (await take(replicas[0].limits, streams)).kind == "streams"
        assert held[0] is not None
        replicas[0].limits.settle(held[0], None)
        async with asyncio.timeout(5):
            while (verdict := await take(replicas[1].limits, streams, tokens=201)).kind == "streams":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert verdict.kind == "budget"


@needs_redis
async def test_a_redis_that_does_not_answer_costs_one_wait(server: RedisServer) -> None:
    subject = Subject("tenant:a", Limits(requests_per_minute=100))
    async with fleet(server, 1) as (replica,):
        server.suspend()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        assert (await take(replica.limits, subject)).lease
        first_s = loop.time() - begun
        assert not replica.store.up
        begun = loop.time()
        for _ in range(50):
            assert (await take(replica.limits, subject)).lease
        assert loop.time() - begun < 0.2
        assert first_s < 3.0
        server.resume()
        await replica.until_up()
        verdict = await take(replica.limits, subject)
        assert verdict.requests is not None
        assert verdict.requests.remaining <= 48


@needs_redis
async def test_open_requests_of_a_replica_that_died_are_free_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow_gateway.store.shared_limits.LEASE_S", 0.3)
    subject = Subject("tenant:a", Limits(concurrent_streams=1))
    dead = Replica(server, "dead")
    await dead.store.start()
    calls = asyncio.create_task(dead.limits.run())
    assert (await take(dead.limits, subject)).lease
    calls.cancel()
    await dead.store.client.aclose()  # nothing of it renews its lease
    async with fleet(server, 1) as (replica,):
        assert (await take(replica.limits, subject)).kind == "streams"
        await until_free(replica.limits, subject)
