"""What a gateway tells a Redis that was away: all of it, each thing once, and in parts that fit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.limits import Replica, fleet, take, until_free
from support.redis_server import RedisServer, needs_redis, redis_server
from tokenflow_gateway.store import shared_limits
from tokenflow_gateway.store.redis import StoreDown
from tokenflow_gateway.store.scripts import AT_ONCE, send_calls
from tokenflow_gateway.tenants.budgets import Spent
from tokenflow_gateway.tenants.limits import Subject, period_of
from tokenflow_gateway.tenants.model import Limits

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


async def requests(replica: Replica, subject: Subject, number: int, *, tokens: int, used: int) -> None:
    """So many requests, which end at once."""
    for _ in range(number):
        lease = (await take(replica.limits, subject, tokens=tokens)).lease
        assert lease is not None
        replica.limits.settle(lease, used)


async def until_lost(replica: Replica) -> None:
    async with asyncio.timeout(10):
        while replica.store.lost == 0:  # noqa: ASYNC110 - it has no event for tests
            await asyncio.sleep(0.01)


async def remaining(replica: Replica, subject: Subject) -> int:
    """Of its tokens a minute."""
    verdict = await take(replica.limits, subject)
    assert verdict.tokens is not None
    return verdict.tokens.remaining


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_redis_that_goes_again_and_again_is_told_the_rest_each_time(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """It is there for a few round trips at a time, whether or not it has forgotten what was before."""
    monkeypatch.setattr("tokenflow_gateway.store.redis._RETRY_S", 0.0)
    subject = Subject("tenant:a", Limits(tokens_per_minute=1_000_000, budget_tokens=10_000_000))
    sent = 0

    async def fail_often(*call: Any) -> list[Any]:
        nonlocal sent
        sent += 1
        if sent % 4 == 0:
            raise StoreDown("gone again")
        return await send_calls(*call)

    replica = Replica(server, "a")
    if not restarted:
        server.kill()
    async with replica.running():
        await requests(replica, subject, 1000, tokens=10, used=60)
        if restarted:
            server.kill()
        await requests(replica, subject, 1000, tokens=10, used=60)
        monkeypatch.setattr(shared_limits, "send_calls", fail_often)
        server.start()
        await replica.until_up()
        assert 2000 // AT_ONCE <= sent < 2 * 2000 // AT_ONCE
        assert await remaining(replica, subject) == 1_000_000 - 2000 * 60
        assert await replica.spent(subject) == 2000 * 60


async def test_what_has_ended_is_never_open_to_the_others(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject("tenant:a", Limits(concurrent_streams=50, tokens_per_minute=100_000))
    open_ones: list[int] = []

    async def look(client: Any, *call: Any) -> list[Any]:
        answers = await send_calls(client, *call)
        open_ones.append(await client.zcard(replica.store.key("limits", subject.name, "open")))
        return answers

    server.kill()
    replica = Replica(server, "a")
    async with replica.running():
        await requests(replica, subject, 3 * AT_ONCE, tokens=10, used=1)
        assert (await take(replica.limits, subject, tokens=10)).lease, "this one is open"
        monkeypatch.setattr(shared_limits, "send_calls", look)
        server.start()
        await replica.until_up()
        assert max(open_ones) == 1
        assert await remaining(replica, subject) == 100_000 - 3 * AT_ONCE - 10


async def test_what_counts_no_more_is_not_kept_for_a_redis_that_is_away(server: RedisServer) -> None:
    subject = Subject("tenant:a", Limits(tokens_per_minute=1_000_000))
    server.kill()
    replica = Replica(server, "a")
    async with replica.running():
        replica.store.ahead_s = -480.0
        open_one = (await take(replica.limits, subject, tokens=10)).lease
        assert open_one is not None
        for _ in range(4):
            await requests(replica, subject, 1000, tokens=10, used=10)
            replica.store.ahead_s += 120
        assert len(replica.limits._taken) <= 2001
        replica.limits.settle(open_one, 500)
        server.start()
        await replica.until_up()
        assert await remaining(replica, subject) == 1_000_000 - 490, "used just now, beyond what was taken"


@pytest.mark.parametrize("how", ["unheard", "forgotten", "beside an error"])
async def test_an_end_that_redis_has_counted_and_nobody_heard_of_counts_once(
    server: RedisServer, how: str
) -> None:
    subject = Subject("tenant:a", Limits(tokens_per_minute=1000, budget_tokens=10_000))
    async with fleet(server, 1) as (replica,):
        leases = [(await take(replica.limits, subject, tokens=100)).lease for _ in range(2)]
        if how == "unheard":
            server.suspend()
        elif how == "forgotten":
            await replica.store.client.flushall()
        for lease, used in zip(leases, (300, 40), strict=True):
            assert lease is not None
            replica.limits.settle(lease, used)
        if how == "beside an error":
            failed = replica.limits._calls.post(["none"], ["take", "id", 1, 1, "a", "another epoch"])
            with contextlib.suppress(StoreDown):
                await failed
        await until_lost(replica)
        if how == "unheard":
            server.resume()
        await replica.until_up()
        assert await remaining(replica, subject) == 1000 - 300 - 40
        assert await replica.spent(subject) == 340


async def test_a_telling_that_redis_has_heard_and_not_answered_counts_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject("tenant:a", Limits(tokens_per_minute=1000, budget_tokens=10_000))
    sent = 0

    async def lose_answers(*call: Any) -> list[Any]:
        nonlocal sent
        sent += 1
        answers = await send_calls(*call)
        if sent in {1, 3}:
            raise StoreDown("the answer got lost")
        return answers

    server.kill()
    replica = Replica(server, "a")
    async with replica.running():
        await requests(replica, subject, 2, tokens=100, used=140)
        await requests(replica, subject, 1, tokens=100, used=10)
        assert (await take(replica.limits, subject, tokens=50)).lease
        monkeypatch.setattr(shared_limits, "send_calls", lose_answers)
        server.start()
        await replica.until_up()
        assert sent > 3
        assert await remaining(replica, subject) == 1000 - 2 * 140 - 10 - 50
        assert await replica.spent(subject) == 340


async def test_a_request_that_uses_nothing_while_budgets_are_told_changes_none(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject("tenant:a", Limits(budget_tokens=10_000))
    meanwhile = 0

    async def come_and_go(client: Any, script: Any, calls: Any) -> list[Any]:
        nonlocal meanwhile
        if calls[0][1][0] == "spent" and meanwhile < 2:
            meanwhile += 1
            await requests(replica, subject, 1, tokens=100, used=0)
        return await send_calls(client, script, calls)

    server.kill()
    replica = Replica(server, "a")
    async with replica.running():
        await requests(replica, subject, 1, tokens=100, used=150)
        monkeypatch.setattr(shared_limits, "send_calls", come_and_go)
        server.start()
        await replica.until_up()
        assert meanwhile == 2
        assert await replica.spent(subject) == 150


async def test_the_last_end_is_told_before_a_gateway_stops(server: RedisServer) -> None:
    subject = Subject("tenant:a", Limits(concurrent_streams=9, budget_tokens=10_000))
    async with fleet(server, 1) as (replica,):
        leases = [(await take(replica.limits, subject, tokens=100)).lease for _ in range(9)]
        for lease in leases:
            assert lease is not None
            replica.limits.settle(lease, 10)
        await replica.limits.aclose()
        assert await replica.spent(subject) == 90
        lease = (await take(replica.limits, subject, tokens=100)).lease
        assert lease is not None
        server.suspend()
        replica.limits.settle(lease, 10)
        await replica.limits.aclose()
        assert not replica.store.up, "it does not wait for longer"


async def test_what_was_read_of_budgets_holds_where_the_record_cannot_be_read(server: RedisServer) -> None:
    """Of a process that is no more, and of which Redis has forgotten."""
    subject = Subject("tenant:a", Limits(budget_tokens=1000))
    period, _ = period_of("month", time.time())
    replica = Replica(server, "a")
    replica.record = [Spent("tenant:a", period, "gone", 300)]
    async with replica.running():
        assert await replica.spent(subject) == 300
        replica.record = None
        server.kill()
        server.start()
        await replica.until_back()
        assert await replica.spent(subject) == 300
        assert (await until_free(replica.limits, subject, tokens=700)).lease
