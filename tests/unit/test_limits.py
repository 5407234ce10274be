"""Limits, by one suite over both stores: this process's and a fleet's in a real Redis."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.limits import Replica, fleet, take, until_free
from support.redis_server import RedisServer, needs_redis, redis_server
from tokenflow_gateway.relay.allowance import allowed
from tokenflow_gateway.store import shared_limits
from tokenflow_gateway.tenants.budgets import Spent
from tokenflow_gateway.tenants.limits import (
    Lease,
    LimitStore,
    LocalLimits,
    Subject,
    period_of,
    subjects_of,
)
from tokenflow_gateway.tenants.model import Limits, Principal, Tenant


@pytest.fixture(params=["local", pytest.param("redis", marks=needs_redis)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LimitStore]:
    if request.param == "local":
        yield LocalLimits()
        return
    with redis_server(tmp_path) as server:
        async with fleet(server, 1) as (replica,):
            assert replica.store.up
            yield replica.limits


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


async def test_what_generates_nothing_takes_no_place_among_the_streams(store: LimitStore) -> None:
    limits = Limits(concurrent_streams=1, requests_per_minute=10)
    subject = Subject("tenant:a", limits)
    with await allowed(store, (subject,), tokens=5, headers=[], generates=False):
        stream = await until_free(store, subject)
        assert stream.requests is not None
        assert stream.requests.remaining == 8, "it counts as a request"
        with await allowed(store, (subject,), tokens=5, headers=[], generates=False):
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
    rotated = Principal(tenant=tenant, key_id="k2", key_origin="k", limits=limited)
    assert subjects_of(rotated) == subjects_of(both)


def test_of_a_budget_what_is_left_is_shared() -> None:
    subject = Subject("tenant:a", Limits(budget_tokens=1000))
    local = LocalLimits()
    for _ in range(2):  # once is enough
        local.remember("tenant:a", period_of("month", time.time())[0], 600)
    assert local.take_now([subject], lease_id="1", tokens=201, processes=2).kind == "budget"
    assert local.take_now([subject], lease_id="2", tokens=200, processes=2).lease
    assert local.take_now([subject], lease_id="3", tokens=1, processes=2).kind == "budget"
    assert local.take_now([subject], lease_id="4", tokens=200).lease


def test_what_is_counted_already_is_not_remembered_again() -> None:
    subject = Subject("tenant:a", Limits(budget_tokens=1000))
    local = LocalLimits()
    assert local.take_now([subject], lease_id="1", tokens=300).lease
    local.remember("tenant:a", period_of("month", time.time())[0], 500)
    assert local.take_now([subject], lease_id="2", tokens=501).kind == "budget"
    assert local.take_now([subject], lease_id="3", tokens=500).lease


def test_a_request_from_elsewhere_counts_where_it_still_does() -> None:
    """An old one as a stream, and in its own budget's period; each of them once."""
    now = 1_709_251_200.0 + 3600  # 2024-03-01 01:00
    limits = LocalLimits(clock=lambda: now)
    subject = Subject("tenant:a", Limits(requests_per_minute=9, concurrent_streams=9, budget_tokens=1000))
    old = Lease("old", (subject,), 400, now - 7200)
    recent = Lease("recent", (subject,), 100, now - 30)
    for lease in (old, recent, recent):
        limits.restore(lease)
    assert limits.statistics() == {"tenant:a": (1, 100, 2)}
    assert limits.spendings() == {("tenant:a", "2024-03"): 100}
    limits.settle(old, 450)
    limits.settle(recent, 90)
    assert limits.statistics() == {"tenant:a": (1, 140, 0)}


def test_what_was_used_beyond_the_estimate_is_of_the_budget_that_the_request_began_with() -> None:
    now = 1_709_251_200.0 - 60  # 2024-02-29 23:59
    limits = LocalLimits(clock=lambda: now)
    subject = Subject("tenant:a", Limits(budget_tokens=1000))
    early, late = [limits.take_now([subject], lease_id=name, tokens=100).lease for name in ("early", "late")]
    assert early is not None
    assert late is not None
    limits.settle(early, 150)
    assert limits.spendings() == {("tenant:a", "2024-02"): 250}
    now += 120
    limits.settle(late, 900)
    assert limits.spendings() == {("tenant:a", "2024-03"): 0}


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
        assert (await take(replica.limits, subject)).lease
        server.suspend()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        assert (await take(replica.limits, subject)).lease
        first_s = loop.time() - begun
        assert not replica.store.up
        begun = loop.time()
        for _ in range(50):
            assert (await take(replica.limits, subject)).lease
        assert loop.time() - begun < 0.8, "less than one wait more"
        assert first_s < 3.0
        server.resume()
        await replica.until_up()
        verdict = await take(replica.limits, subject)
        assert verdict.requests is not None
        assert verdict.requests.remaining == 47, "the one that Redis counted after all, unheard, counts once"


@needs_redis
async def test_budgets_survive_a_redis_that_forgets_whoever_tells_of_them(server: RedisServer) -> None:
    """Three processes with one record of usage, which has what they and one before them have written."""
    subject = Subject("tenant:a", Limits(budget_tokens=1000, budget_period="month"))
    period, _ = period_of("month", time.time())
    gone = Spent("tenant:a", period, "gone", 300)
    replicas = [Replica(server, f"replica-{index}") for index in range(3)]
    async with AsyncExitStack() as stack:
        for replica in replicas:
            replica.record = [gone]
            await stack.enter_async_context(replica.running())
        assert await replicas[0].spent(subject) == 300, "a Redis that has nothing yet is told, once"
        for replica, used in zip(replicas, (10, 20, 30), strict=True):
            lease = (await take(replica.limits, subject, tokens=100)).lease
            assert lease is not None
            replica.limits.settle(lease, used)
        open_one = (await take(replicas[0].limits, subject, tokens=100)).lease
        assert open_one is not None
        for replica in replicas:  # what has ended is on record
            replica.record = [
                gone,
                *(Spent("tenant:a", period, f"replica-{n}", 10 + 10 * n) for n in range(3)),
            ]
        server.kill()
        server.start()
        for replica in replicas:
            await replica.until_back()
        assert await replicas[0].spent(subject) == 300 + 10 + 20 + 30 + 100
        replicas[0].limits.settle(open_one, 40)
        assert (await until_free(replicas[1].limits, subject, tokens=600)).lease
        assert (await take(replicas[2].limits, subject, tokens=1)).kind == "budget"


@needs_redis
async def test_open_requests_outlast_a_time_without_redis(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than their leases, while others go on with Redis."""
    subject = Subject("tenant:a", Limits(concurrent_streams=2))
    cut_off = Replica(server, "cut-off")
    await cut_off.store.start()
    calls = asyncio.create_task(cut_off.limits.run())
    with monkeypatch.context() as short:  # nothing renews this lease: the store does not run
        short.setattr("tokenflow_gateway.store.shared_limits.LEASE_S", 0.3)
        assert (await take(cut_off.limits, subject)).lease
    async with fleet(server, 1) as (other,):
        assert (await take(other.limits, subject)).lease
        in_its_place = (await until_free(other.limits, subject)).lease
        assert in_its_place is not None
        other.limits.settle(in_its_place, None)
        await cut_off.store._try()
        assert (await take(other.limits, subject)).kind == "streams"
    calls.cancel()
    await cut_off.store.client.aclose()


@needs_redis
@pytest.mark.parametrize(("processes", "allowed"), [(1, 100), (4, 25)])
async def test_a_gateway_that_starts_without_redis_has_its_share_where_it_is_said(
    server: RedisServer, processes: int, allowed: int
) -> None:
    server.kill()
    replica = Replica(server, "alone", processes=processes)
    async with replica.running():
        subject = Subject("tenant:a", Limits(requests_per_minute=100))
        verdicts = [await take(replica.limits, subject) for _ in range(120)]
    assert sum(verdict.lease is not None for verdict in verdicts) == allowed


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


# ---- what is used beyond the limit ------------------------------------------------------------------


async def test_what_was_used_beyond_a_minute_is_paid_by_the_following_ones(store: LimitStore) -> None:
    subject = Subject("tenant:a", Limits(tokens_per_minute=1000))
    first = await take(store, subject, tokens=500)
    assert first.lease is not None
    store.settle(first.lease, 10_000)
    async with asyncio.timeout(5):
        while (refused := await take(store, subject, tokens=1)).retry_s < 60:  # noqa: ASYNC110 - see `until_free`
            await asyncio.sleep(0.01)
    assert refused.kind == "tokens"
    assert 9 * 60.5 < refused.retry_s <= 10 * 60.5
    assert refused.tokens is not None
    assert refused.tokens.remaining == 0
    assert refused.tokens.reset_s == pytest.approx(refused.retry_s, abs=1.0)


@needs_redis
async def test_debts_are_the_same_in_redis_at_any_time(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's own, with minutes in which nobody looks."""
    script = shared_limits._SCRIPT.replace("redis.call('TIME')", "redis.call('LRANGE', 'clock', 0, 1)")
    assert script != shared_limits._SCRIPT
    monkeypatch.setattr(shared_limits, "_SCRIPT", script)
    choose = random.Random(7)  # noqa: S311 - no secret
    now = 1_600_000_000.25  # long ago: leases are renewed by the true time
    local = LocalLimits(clock=lambda: now)
    subject, nobody = Subject("tenant:a", Limits(tokens_per_minute=100)), Subject("tenant:b", Limits())
    owed = 0
    async with fleet(server, 1) as (replica,):
        both = (local, replica.limits)
        for _ in range(400):
            now += choose.choice([0.0, 0.5, 3.0, 20.0, 59.0, 61.0, 130.0, 700.0])
            await replica.store.client.delete("clock")
            await replica.store.client.rpush("clock", int(now), int(now % 1 * 1e6))
            taken = []
            for tokens in (choose.choice([1, 10, 60]), choose.choice([1, 10, 60])):
                here, there = [await take(limits, subject, tokens=tokens) for limits in both]
                assert here.kind == there.kind
                assert here.retry_s == pytest.approx(there.retry_s, abs=0.002)
                assert here.tokens is not None
                assert there.tokens is not None
                assert here.tokens.remaining == there.tokens.remaining
                assert here.tokens.reset_s == pytest.approx(there.tokens.reset_s, abs=0.002)
                owed += here.retry_s > 61
                taken.append((here.lease, there.lease))
            for one, other in taken:
                if one is not None and other is not None:
                    used = choose.choice([0, 5, 70, 150, 1000])
                    local.settle(one, used)
                    replica.limits.settle(other, used)
            await take(replica.limits, nobody)  # Redis has heard of it
    assert owed > 20
