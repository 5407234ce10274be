"""Several gateways and one Redis, a real one: what they share, and what becomes of it when Redis goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.keys import make_key, revoke_key
from support.redis_server import RedisServer, needs_redis, redis_server
from support.replay_engine import ReplayEngine
from support.transcripts import load
from tokenflow_gateway.store.sqlite import StoreError
from tokenflow_gateway.store.usage import USAGE_FILE, UsageStore, summed
from tokenflow_gateway.tenants.keys import NewKey
from tokenflow_gateway.tenants.limits import period_of

pytestmark = needs_redis

CHAT = "/v1/chat/completions"
SECRET = "a secret that all gateways have"


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.sglang("chat_stream", "chat_stream_usage")
    scripts["endless"] = scenarios.endless(load("chat_stream"))
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@asynccontextmanager
async def fleet(
    engine: ReplayEngine, folder: Path, redis: RedisServer | None, size: int = 2, **settings: Any
) -> AsyncIterator[list[RunningGateway]]:
    """Gateways with a state of their own each; with `redis` they share what gateways share."""
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    shared = {} if redis is None else {"redis": {"url": redis.url, "secret": SECRET}}
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(
                running_gateway(
                    entry, state_dir=folder / str(index), gateway_id=f"g{index}", **shared, **settings
                )
            )
            for index in range(size)
        ]
        if redis is not None:
            for gateway in gateways:
                await up(gateway)
        yield gateways


async def up(gateway: RunningGateway, *, is_up: bool = True) -> None:
    store = gateway.app.fleet.store
    assert store is not None
    await eventually(lambda: store.up is is_up, f"redis is {'there' if is_up else 'gone'}")


def asks(model: str = "chat_stream", **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}


async def post(gateway: RunningGateway, key: NewKey | None = None, **fields: object) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key.text}"}
    return await gateway.client.post(CHAT, json=asks(**fields), headers=headers)


# ---- limits --------------------------------------------------------------------------------------------


def limited(**limits: object) -> dict[str, Any]:
    return {"tenants": {"anonymous": {"limits": limits}}}


async def statuses(gateways: list[RunningGateway], count: int) -> list[int]:
    asked = (post(gateways[index % len(gateways)]) for index in range(count))
    return [answer.status_code for answer in await asyncio.gather(*asked)]


async def test_limits_are_exact_over_gateways_under_concurrent_load(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow_gateway.store.redis.ANSWER_WITHIN_S", 30.0)  # this machine may be busy
    async with fleet(engine, tmp_path, redis, **limited(requests_per_minute=40)) as gateways:
        got = await statuses(gateways, 90)
        assert (got.count(200), got.count(429)) == (40, 50)
        assert [gateway.metric("tokenflow_redis_lost_total") for gateway in gateways] == [0, 0]


async def test_gateways_that_share_nothing_let_twice_as_much_through(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    """The negative control of the one before."""
    async with fleet(engine, tmp_path, None, **limited(requests_per_minute=40)) as gateways:
        assert (await statuses(gateways, 90)).count(200) == 80


async def test_streams_at_a_time_count_over_gateways(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer
) -> None:
    async with fleet(engine, tmp_path, redis, **limited(concurrent_streams=1)) as (here, there):
        async with here.client.stream("POST", CHAT, json=asks("endless")) as answer:
            await anext(answer.aiter_bytes())
            assert (await post(there)).headers["x-tokenflow-reason"] == "streams"
        await here.everything_released()
        async with asyncio.timeout(5):
            while (await post(there)).status_code != 200:  # noqa: ASYNC110 - told in the background
                await asyncio.sleep(0.02)


async def test_without_redis_gateways_go_on_by_themselves_and_say_so(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer
) -> None:
    async with fleet(engine, tmp_path, redis, **limited(requests_per_minute=20)) as gateways:
        for gateway in gateways:
            store = gateway.app.fleet.store
            assert store is not None
            await store.refresh_members()
        redis.kill()
        got = await statuses(gateways, 60)
        assert got.count(200) == 20
        assert [gateway.metric("tokenflow_redis_up") for gateway in gateways] == [0, 0]
        assert [gateway.metric("tokenflow_redis_lost_total") for gateway in gateways] == [1, 1]
        redis.start()
        for gateway in gateways:
            await up(gateway)
        assert await statuses(gateways, 4) == [429] * 4  # it was told of what they did
        assert [gateway.metric("tokenflow_redis_up") for gateway in gateways] == [1, 1]


async def test_a_gateway_starts_without_redis_and_finds_it_later(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer
) -> None:
    redis.kill()
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path, redis={"url": redis.url}) as gateway:
        assert (await post(gateway)).status_code == 200
        redis.start()
        await up(gateway)


@pytest.mark.parametrize(("gateways", "allowed"), [(1, 20), (2, 10)])
async def test_one_that_starts_without_redis_has_its_share_where_it_is_said(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer, gateways: int, allowed: int
) -> None:
    """The first line is the negative control: nobody has said how many there are."""
    redis.kill()
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    shared = {"redis": {"url": redis.url, "gateways": gateways}}
    async with running_gateway(
        entry, state_dir=tmp_path, **shared, **limited(requests_per_minute=20)
    ) as gateway:
        assert (await statuses([gateway], 30)).count(200) == allowed


async def test_what_is_spent_outlives_redis_and_gateways_and_counts_once(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways with one record of usage, as workers have it; each tells of all that is in it."""
    settings = {"state_dir": tmp_path, **limited(budget_tokens=1_000_000)}
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    shared = {"redis": {"url": redis.url, "secret": SECRET}}

    @asynccontextmanager
    async def both() -> AsyncIterator[list[RunningGateway]]:
        async with (
            running_gateway(entry, gateway_id="g0", **shared, **settings) as here,
            running_gateway(entry, gateway_id="g1", **shared, **settings) as there,
        ):
            yield [here, there]

    async def spent(gateway: RunningGateway) -> int:
        store = gateway.app.fleet.store
        assert store is not None
        period, _ = period_of("month", time.time())
        figures = await store.client.hgetall(store.key("limits", "tenant:anonymous", f"spent:{period}"))
        total = int(figures.pop(b"total", 0))
        assert total == sum(map(int, figures.values()))
        return total

    async def until_spent(gateway: RunningGateway, tokens: int) -> None:
        async with asyncio.timeout(5):
            while await spent(gateway) != tokens:  # noqa: ASYNC110 - ends are told in the background
                await asyncio.sleep(0.02)

    UsageStore(tmp_path / USAGE_FILE).close()

    def recorded() -> dict[str, Any]:
        return summed(tmp_path / USAGE_FILE, by=())[0]

    def unreadable(*_args: object) -> NoReturn:
        raise StoreError("no")

    async def lost_and_up(gateway: RunningGateway) -> None:
        await eventually(lambda: gateway.metric("tokenflow_redis_lost_total") == 1, "it has noticed")
        await up(gateway)

    async def ask_four(gateways: list[RunningGateway]) -> None:
        for gateway in [*gateways, *gateways]:
            assert (await post(gateway, model="chat_stream_usage")).status_code == 200

    async with both() as gateways:
        await ask_four(gateways)
        await eventually(lambda: recorded()["streams"] == 4, "all four are on record")
        four = recorded()["prompt"] + recorded()["generated"]
        assert four > 0
        for gateway in gateways:
            await until_spent(gateway, four)
        redis.kill()
        redis.start()
        for gateway in gateways:
            await lost_and_up(gateway)
        assert await spent(gateways[0]) == four
    redis.kill()
    redis.start()
    async with both() as gateways:
        for gateway in gateways:
            await up(gateway)
        assert await spent(gateways[0]) == four, "neither forgotten nor twice"
        await ask_four(gateways)
        await until_spent(gateways[1], 2 * four)
        monkeypatch.setattr("tokenflow_gateway.fleet.spent_on_record", unreadable)
        redis.kill()
        redis.start()
        for gateway in gateways:
            await lost_and_up(gateway)
        assert await spent(gateways[0]) == 2 * four, "what was on record before"


# ---- progress reports ----------------------------------------------------------------------------------


@asynccontextmanager
async def open_stream(gateway: RunningGateway) -> AsyncIterator[tuple[str, dict[str, object]]]:
    """The path of its reports, and one that is right."""
    async with gateway.client.stream("POST", CHAT, json=asks("endless")) as answer:
        rid, _, capability = answer.headers["x-tokenflow-stream"].partition(".")
        (stream,) = gateway.streams
        reads = answer.aiter_bytes()
        while stream.delivered < 2:
            await anext(reads)
        report = {"capability": capability, "reports": [{"seq": 0, "tokens": 1, "paused": True}]}
        yield f"/v1/streams/{rid}/progress", report


async def test_reports_reach_their_stream_through_any_gateway(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer
) -> None:
    async with fleet(engine, tmp_path, redis) as (owner, wrong), open_stream(owner) as (path, report):
        answer = await wrong.client.post(path, json=report)
        assert answer.status_code == 200
        assert answer.json()["consumed"] == 1.0
        (shown,) = (await owner.client.get("/admin/streams")).json()["streams"]
        assert (shown["source"], shown["reader_state"]) == ("progress", "paused")
        assert wrong.metric("tokenflow_progress_forwarded_total") == 1
        forged = {**report, "capability": "A" * 22}
        assert (await wrong.client.post(path, json=forged)).status_code == 403


async def test_a_gateway_by_itself_does_not_know_another_ones_streams(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    """The negative control of the one before."""
    async with fleet(engine, tmp_path, None) as (owner, wrong), open_stream(owner) as (path, report):
        assert (await wrong.client.post(path, json=report)).status_code == 403


async def test_reports_of_a_stream_whose_gateway_is_gone(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer
) -> None:
    async with fleet(engine, tmp_path, redis, size=1) as (wrong,):
        async with (
            fleet(engine, tmp_path / "other", redis, size=1) as (owner,),
            open_stream(owner) as (path, report),
        ):
            assert (await wrong.client.post(path, json=report)).status_code == 200
        assert (await wrong.client.post(path, json=report)).status_code == 404


async def test_reports_through_the_wrong_gateway_come_again_when_redis_is_back(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer
) -> None:
    async with fleet(engine, tmp_path, redis) as (owner, wrong), open_stream(owner) as (path, report):
        assert (await wrong.client.post(path, json=report)).status_code == 200
        redis.kill()
        later = await wrong.client.post(path, json=report)
        assert later.status_code == 503
        assert later.headers["retry-after"]
        assert (await owner.client.post(path, json=report)).status_code == 200  # its own go on
        redis.start()
        async with asyncio.timeout(10):
            while (await wrong.client.post(path, json=report)).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


# ---- keys, habits, draining ----------------------------------------------------------------------------


async def test_a_key_of_one_gateway_is_known_to_all_and_revoked_everywhere(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer
) -> None:
    tenants = {"acme": {}}
    made = make_key(tmp_path / "0")
    async with fleet(engine, tmp_path, redis, tenants=tenants) as (here, there):

        async def until(gateway: RunningGateway, status: int) -> None:
            async with asyncio.timeout(10):
                while (await post(gateway, made)).status_code != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        await until(there, 200)
        revoke_key(tmp_path / "0", made)
        await until(here, 401)
        await until(there, 401)
        redis.kill()
        redis.start()  # it has forgotten all keys
        for gateway in (here, there):
            await eventually(
                lambda gateway=gateway: gateway.metric("tokenflow_redis_lost_total") == 1, "it has noticed"
            )
            await up(gateway)
            assert (await post(gateway, made)).status_code == 401


async def test_redis_holds_no_secret_of_a_key(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer
) -> None:
    made = make_key(tmp_path / "0")
    async with fleet(engine, tmp_path, redis, tenants={"acme": {}}) as (here, there):
        await eventually(lambda: len(there.app._keyring) == 1, "the key is shared")
        store = here.app.fleet.store
        assert store is not None
        held = await store.client.hgetall(store.key("keys"))
        assert list(held) == [made.key.id.encode()]
        assert made.key.secret.encode() not in b"".join(held.values())


async def test_what_one_gateway_has_learned_of_a_reader_all_know(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer
) -> None:
    async with fleet(engine, tmp_path, redis) as (here, there):
        ours, theirs = here.app.fleet.learned, there.app.fleet.learned
        assert ours is not None
        assert theirs is not None
        name = ours.name(tenant="a", user="u", reader="human")
        assert theirs.name(tenant="a", user="u", reader="human") == name
        now = asyncio.get_running_loop().time()
        ours.learn(name, ratio=2.0, seconds=300.0, now=now)
        await eventually(lambda: theirs.habit(name, now=now) is not None, "the habit is known")
        habit = theirs.habit(name, now=now)
        assert habit is not None
        assert habit.ratio > 1.5
        async with fleet(engine, tmp_path / "late", redis, size=1) as (late,):
            learned = late.app.fleet.learned
            assert learned is not None
            assert learned.habit(name, now=now) is None  # asked for, and there for the next stream
            await eventually(lambda: learned.habit(name, now=now) is not None, "the habit was fetched")


async def test_draining_said_to_one_gateway_holds_for_all_and_for_those_who_come(
    engine: ReplayEngine, tmp_path: Path, redis: RedisServer
) -> None:
    async with fleet(engine, tmp_path, redis) as (here, there):
        said = await here.client.post("/admin/engines/e/draining", json={"draining": True})
        assert said.status_code == 200
        (theirs,) = there.app.registry
        await eventually(lambda: theirs.draining, "it is draining there, too")
        assert (await post(there)).status_code == 503
        (shown,) = (await there.client.get("/admin/engines")).json()["engines"]
        assert (shown["draining"], shown["reason"]) == (True, "draining")
        async with fleet(engine, tmp_path / "late", redis, size=1) as (late,):
            (engine_there,) = late.app.registry
            await eventually(lambda: engine_there.draining, "one that comes knows it")
        await there.client.post("/admin/engines/e/draining", json={"draining": False})
        (ours,) = here.app.registry
        await eventually(lambda: not ours.draining, "it is asked again")
        assert (await post(here)).status_code == 200
        assert (
            await here.client.post("/admin/engines/x/draining", json={"draining": True})
        ).status_code == 404
