"""Responses that engines store: each is at one engine, and some run on when their client has its answer."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.gateway import RunningGateway, eventually, running_gateway
from support.keys import make_key
from support.plugin_stand_in import PluginStandIn
from support.storing_engine import RESPONSES, StoringEngine
from tokenflow_gateway.relay import background
from tokenflow_gateway.store.sqlite import StoreError
from tokenflow_gateway.store.usage import USAGE_FILE, summed


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StoringEngine]:
    monkeypatch.setattr(background, "_SHORTEST_S", 0.005)
    monkeypatch.setattr(background, "_LONGEST_S", 0.02)
    async with StoringEngine() as engine:
        yield engine


def limited(
    engine: StoringEngine, state: Path, *, link: str | None = "off", **settings: Any
) -> AbstractAsyncContextManager[RunningGateway]:
    """A gateway whose anonymous tenant has one stream at a time, and 10,000 tokens a minute."""
    entry = {"url": engine.base_url, "id": "e", **({} if link is None else {"link": link})}
    limits = {"concurrent_streams": 1, "tokens_per_minute": 10_000}
    return running_gateway(entry, state_dir=state, tenants={"anonymous": {"limits": limits}}, **settings)


def unlimited(engine: StoringEngine, state: Path) -> AbstractAsyncContextManager[RunningGateway]:
    return running_gateway({"url": engine.base_url, "id": "e", "link": "off"}, state_dir=state)


async def respond(
    gateway: RunningGateway, headers: dict[str, str] | None = None, **fields: object
) -> httpx.Response:
    asked = {"model": "m", "input": "hi", "max_output_tokens": 1000, **fields}
    return await gateway.client.post(RESPONSES, json=asked, headers=headers)


async def begun(gateway: RunningGateway) -> str:
    """The id of a response that runs in the background."""
    answer = await respond(gateway, background=True)
    assert (answer.status_code, answer.json()["status"]) == (200, "queued")
    rid: str = answer.json()["id"]
    assert [stream.rid for stream in gateway.streams] == [rid]
    return rid


async def ended(gateway: RunningGateway, state: Path, end: str) -> dict[str, Any]:
    """The record of the one stream, which has ended so."""
    await gateway.everything_released()
    await eventually(lambda: bool(recorded(state)), "the stream is on record")
    (row,) = recorded(state)
    assert row["end"] == end
    return row


def recorded(state: Path) -> list[dict[str, Any]]:
    try:
        return summed(state / USAGE_FILE, by=("end",))
    except StoreError:  # it is being made
        return []


async def used(gateway: RunningGateway) -> int:
    """Tokens of the last minute, but for this request's own."""
    answer = await respond(gateway)
    assert answer.status_code == 200
    taken = 1000 + len('"hi"') // 4
    return 10_000 - int(answer.headers["x-ratelimit-remaining-tokens"]) - taken


# ---- in the background ------------------------------------------------------------------------------


async def test_what_runs_in_the_background_counts_until_its_end(
    engine: StoringEngine, tmp_path: Path
) -> None:
    async with limited(engine, tmp_path) as gateway:
        rid = await begun(gateway)
        for fields in ({"background": True}, {}):
            refused = await respond(gateway, **fields)
            assert (refused.status_code, refused.headers["x-tokenflow-reason"]) == (429, "streams")
        found = await gateway.client.get(f"{RESPONSES}/{rid}")
        assert found.json()["status"] == "queued", "to ask for it takes no place"
        engine.stored[rid]["status"] = "in_progress"
        engine.end(rid)
        row = await ended(gateway, tmp_path, "finished")
        assert (row["prompt"], row["generated"], row["delivered"]) == (30, 70, 70)
        assert await used(gateway) == 100
        assert not engine.aborted


async def test_its_client_may_leave(engine: StoringEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path) as gateway:
        async with httpx.AsyncClient(base_url=gateway.base_url, trust_env=False) as other:
            asked = {"model": "m", "input": "hi", "background": True}
            rid = (await other.post(RESPONSES, json=asked)).json()["id"]
        before = len(engine.requests)
        await engine.request(before + 2)  # the engine is asked on
        assert [stream.rid for stream in gateway.streams] == [rid]
        engine.end(rid, "incomplete")
        await ended(gateway, tmp_path, "finished")
        assert not engine.aborted


async def test_it_waits_for_its_turn_and_the_plugin_knows_it(engine: StoringEngine, tmp_path: Path) -> None:
    classes = {"bronze": {"weight": 0.5, "ttft_ms": 60_000}}
    tenants = {"anonymous": {"classes": ["bronze"]}}
    with PluginStandIn(engine.base_url) as plugin:
        entry = {"url": engine.base_url, "id": "e"}
        async with running_gateway(
            entry, state_dir=tmp_path, classes=classes, tenants=tenants, admission={"engine_queue": 1}
        ) as gateway:
            (known,) = gateway.app.registry
            await eventually(lambda: known.linked, "linked")
            plugin.tells(waiting=50)
            await eventually(lambda: known.stats is not None and known.stats.waiting == 50, "it is busy")
            task = asyncio.create_task(begun(gateway))
            await eventually(lambda: gateway.app.fleet.admission.waiting == {"bronze": 1}, "it waits")
            assert not engine.stored
            plugin.tells(waiting=0)
            rid = await task
            await eventually(lambda: plugin.opened == [rid], "it is announced")
            assert (plugin.announced[rid].sla, plugin.announced[rid].weight) == ("bronze", 0.5)
            assert not plugin.closed
            engine.end(rid)
            await gateway.everything_released()
            assert plugin.closed == {rid: "finished"}


async def test_of_one_that_was_cancelled_nobody_tells_what_it_used(
    engine: StoringEngine, tmp_path: Path
) -> None:
    """So it is as much as was expected."""
    async with limited(engine, tmp_path) as gateway:
        rid = await begun(gateway)
        engine.stored[rid]["status"] = "cancelled"
        await ended(gateway, tmp_path, "client_gone")
        assert await used(gateway) == 1001


async def test_one_that_has_failed_is_told_as_such(engine: StoringEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path) as gateway:
        engine.end(await begun(gateway), "failed")
        row = await ended(gateway, tmp_path, "engine_error")
        assert row["generated"] == 70


async def test_an_engine_that_knows_it_no_more_is_told_to_give_it_up(
    engine: StoringEngine, tmp_path: Path
) -> None:
    """It has been restarted, or cannot be asked: nothing may run there that is not counted."""
    async with limited(engine, tmp_path) as gateway:
        rid = await begun(gateway)
        before = len(engine.requests)
        engine.stored.clear()
        await ended(gateway, tmp_path, "engine_error")
        assert sum(seen.path.endswith(rid) for seen in engine.requests[before:]) >= background._TRIES
        await eventually(lambda: engine.aborted == [rid], "it is given up")
        assert await used(gateway) == 1001


async def test_that_an_engine_knows_several_no_more_is_no_failure_of_its_own(
    engine: StoringEngine, tmp_path: Path
) -> None:
    """It has answered: other requests are its as before."""
    async with unlimited(engine, tmp_path) as gateway:
        for _ in range(4):
            assert (await respond(gateway, background=True)).status_code == 200
        engine.stored.clear()
        await ended(gateway, tmp_path, "engine_error")
        (only,) = gateway.app.registry
        assert only.breaker.opened == 0
        assert only.healthy


async def test_an_engine_that_is_gone_is_known_as_such(engine: StoringEngine, tmp_path: Path) -> None:
    """The negative control."""
    async with unlimited(engine, tmp_path) as gateway:
        for _ in range(4):
            assert (await respond(gateway, background=True)).status_code == 200
        await engine.__aexit__()
        await ended(gateway, tmp_path, "engine_lost")
        (only,) = gateway.app.registry
        assert only.breaker.opened == 1


async def test_nothing_of_their_size_is_kept_of_those_that_go_on(
    engine: StoringEngine, tmp_path: Path
) -> None:
    size, number = 1_000_000, 8
    async with unlimited(engine, tmp_path) as gateway:
        await respond(gateway)
        tracemalloc.start()
        try:
            for _ in range(number):
                priority = {"priority": 3}  # which is not sent on: the engine's body is another one
                answer = await respond(gateway, background=True, input="x" * size, **priority)
                assert answer.status_code == 200
            del answer

            def is_small() -> bool:
                engine.forget_bodies()
                gc.collect()
                return tracemalloc.get_traced_memory()[0] < size

            await eventually(is_small, "what is kept is less than one of them")
            assert len(gateway.streams) == number
        finally:
            tracemalloc.stop()
            for rid in list(engine.stored):
                engine.end(rid)
        await gateway.everything_released()


async def test_many_are_asked_for_no_more_often_than_some(
    engine: StoringEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with unlimited(engine, tmp_path) as gateway:
        (only,) = gateway.app.registry
        for _ in range(10):
            await respond(gateway, background=True)
        assert only.followed == 10
        monkeypatch.setattr(background, "_MOST_A_SECOND", 50.0)  # so each is asked for five times a second
        await engine.request(len(engine.requests) + 20)
        before, since = len(engine.requests), time.monotonic()
        await engine.request(before + 50)
        assert time.monotonic() - since > 0.7, "which takes a second, and an eighth of it without a bound"
        for rid in list(engine.stored):
            engine.end(rid)
        await gateway.everything_released()
        assert only.followed == 0


async def test_an_engine_that_fails_now_and_then_is_asked_on(engine: StoringEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path) as gateway:
        rid = await begun(gateway)
        for _ in range(background._TRIES):
            kept = engine.stored.pop(rid)
            await engine.request(len(engine.requests))
            engine.stored[rid] = kept
            await engine.request(len(engine.requests) + 1)
        engine.end(rid)
        await ended(gateway, tmp_path, "finished")


async def test_the_total_time_is_that_of_the_response(engine: StoringEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path, timeouts={"total_s": 0.3}) as gateway:
        rid = await begun(gateway)
        await ended(gateway, tmp_path, "total_timeout")
        await eventually(lambda: engine.aborted == [rid], "it is given up")
        assert gateway.metric("tokenflow_timeouts_total", route=RESPONSES, phase="total") == 1


@pytest.mark.parametrize("api_key", [None, "of the engine"])
async def test_an_engine_of_another_kind_is_told_by_its_own_name_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, api_key: str | None
) -> None:
    monkeypatch.setattr(background, "_SHORTEST_S", 0.005)
    async with StoringEngine(is_sglang=False) as engine:
        entry = {"url": engine.base_url, "id": "e", "link": "off", "api_key": api_key}
        async with running_gateway(entry, state_dir=tmp_path, timeouts={"total_s": 0.3}) as gateway:
            theirs = {"authorization": "Bearer of the client"}
            assert (await respond(gateway, theirs, background=True)).json()["id"] == "resp_0"
            await ended(gateway, tmp_path, "total_timeout")
            await eventually(lambda: engine.cancelled == ["resp_0"], "it is given up")
            assert not engine.aborted
            told = engine.requests[-1].headers["authorization"]
            assert told == f"Bearer {api_key or 'of the client'}"
            assert (await respond(gateway, theirs)).status_code == 200
            await gateway.everything_released()
            assert len(engine.cancelled) == 1, "what is complete is not cancelled"


async def test_its_answer_is_counted_when_its_client_has_it(engine: StoringEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path) as gateway:
        rid = await begun(gateway)
        name, labels = "tokenflow_responses_total", {"route": RESPONSES, "status": "200"}
        await eventually(lambda: gateway.metric(name, **labels) == 1, "it is counted")
        engine.end(rid)
        await ended(gateway, tmp_path, "finished")
        assert gateway.metric(name, **labels) == 1


async def test_it_ends_with_its_gateway(engine: StoringEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path, shutdown_grace_s=0) as gateway:
        rid = await begun(gateway)
    assert engine.aborted == [rid]


async def test_an_answer_without_an_id_counts_as_expected(engine: StoringEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path) as gateway:
        engine.tells_ids = False
        await respond(gateway, background=True)
        await ended(gateway, tmp_path, "finished")
        assert await used(gateway) == 1001


# ---- whose engine it is -------------------------------------------------------------------------------


@asynccontextmanager
async def two_engines(state: Path) -> AsyncIterator[tuple[RunningGateway, list[StoringEngine]]]:
    async with StoringEngine() as first, StoringEngine() as second:
        entries = [
            {"url": engine.base_url, "id": f"e{number}", "link": "off"}
            for number, engine in enumerate((first, second), start=1)
        ]
        async with running_gateway(*entries, state_dir=state) as gateway:
            yield gateway, [first, second]


async def stored_on_each(
    gateway: RunningGateway, engines: list[StoringEngine], headers: dict[str, str] | None = None
) -> list[str]:
    """The ids of two responses, of which each engine has one."""
    async with asyncio.timeout(10):
        for number in count():
            if all(engine.stored for engine in engines):
                break
            assert (await respond(gateway, headers, input=f"conversation {number}")).status_code == 200
    return [next(iter(engine.stored)) for engine in engines]


async def test_a_stored_response_is_asked_of_its_engine(tmp_path: Path) -> None:
    async with two_engines(tmp_path) as (gateway, engines):
        for engine, rid in zip(engines, await stored_on_each(gateway, engines), strict=True):
            for _ in range(6):
                assert (await gateway.client.get(f"{RESPONSES}/{rid}")).status_code == 200
            for _ in range(6):
                went_on = await respond(gateway, previous_response_id=rid)
                assert went_on.status_code == 200
                assert went_on.json()["id"] in engine.stored
            cancelled = await gateway.client.post(f"{RESPONSES}/{rid}/cancel")
            assert cancelled.json()["status"] == "cancelled"


async def test_a_name_of_the_engines_own_tells_nobody_where_it_is(tmp_path: Path) -> None:
    """The negative control."""
    async with two_engines(tmp_path) as (gateway, (first, _)):
        first.stored["resp_1"] = {"id": "resp_1", "status": "completed", "usage": None}
        answers = [await gateway.client.get(f"{RESPONSES}/resp_1") for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200, 404}


async def test_an_engine_that_is_draining_gives_what_it_has_but_goes_on_from_nothing(tmp_path: Path) -> None:
    async with two_engines(tmp_path) as (gateway, engines):
        rid, _ = await stored_on_each(gateway, engines)
        await gateway.client.post("/admin/engines/e1/draining", json={"draining": True})
        for _ in range(4):
            assert (await gateway.client.get(f"{RESPONSES}/{rid}")).status_code == 200
        refused = await respond(gateway, previous_response_id=rid)
        assert (refused.status_code, refused.headers["x-tokenflow-reason"]) == (503, "no_engine")


async def test_a_key_that_may_not_use_the_engine_finds_nothing_there(tmp_path: Path) -> None:
    whole, part = make_key(tmp_path), make_key(tmp_path, engines=frozenset({"e2"}))
    mine, theirs = ({"authorization": f"Bearer {made.text}"} for made in (whole, part))
    async with two_engines(tmp_path) as (gateway, engines):
        first, second = await stored_on_each(gateway, engines, mine)
        assert (await gateway.client.get(f"{RESPONSES}/{second}", headers=theirs)).status_code == 200
        assert (await gateway.client.get(f"{RESPONSES}/{first}", headers=theirs)).status_code == 404
        assert (await respond(gateway, theirs, previous_response_id=first)).status_code == 404
        assert (await respond(gateway, theirs, previous_response_id=second)).status_code == 200
