"""Limits and the queue at a running gateway: what its clients see."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.keys import make_key
from support.plugin_stand_in import WELCOME, PluginStandIn
from support.replay_engine import ReplayEngine, Script, Send
from support.transcripts import load
from tokenflow_engine.protocol import StreamOpened
from tokenflow_gateway.store.usage import UsageStore
from tokenflow_gateway.tenants.keys import NewKey
from tokenflow_gateway.tenants.model import Limits, SlaClass

CHAT = "/v1/chat/completions"


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.sglang("chat_stream", "chat_plain")
    scripts["embed"] = Script(headers={"content-type": "application/json"}, steps=[Send(b"{}")])
    scripts["endless"] = scenarios.endless(load("chat_stream"))
    async with ReplayEngine(scripts) as engine:
        yield engine


def limited(
    engine: ReplayEngine, state: Path, limits: dict[str, object], **settings: Any
) -> AbstractAsyncContextManager[RunningGateway]:
    """A gateway whose anonymous tenant has these limits."""
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    tenants = {"anonymous": {"limits": limits}}
    return running_gateway(entry, state_dir=state, tenants=tenants, **settings)


def asks(model: str = "chat_stream", **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}


async def post(gateway: RunningGateway, **fields: object) -> httpx.Response:
    return await gateway.client.post(CHAT, json=asks(**fields))


# ---- limits --------------------------------------------------------------------------------------------


async def test_requests_a_minute_are_told_and_kept(engine: ReplayEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path, {"requests_per_minute": 3}) as gateway:
        answers = await asyncio.gather(*(post(gateway) for _ in range(8)))
        served = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert (len(served), len(refused)) == (3, 5)
        remaining = sorted(answer.headers["x-ratelimit-remaining-requests"] for answer in served)
        assert remaining == ["0", "1", "2"]
        headers = refused[0].headers
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert re.fullmatch(r"1m0(\.[1-5])?s|5\d(\.\d)?s", headers["x-ratelimit-reset-requests"])
        assert headers["x-tokenflow-reason"] == "requests"
        assert 50_000 < int(headers["retry-after-ms"]) <= 60_500
        assert int(headers["retry-after"]) >= 50
        error = refused[0].json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "3 requests a minute" in error["message"]
        assert gateway.metric("tokenflow_rejected_total", reason="requests") == 5
        assert "x-ratelimit-limit-tokens" not in headers


async def test_without_limits_nothing_is_said(engine: ReplayEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path, {}) as gateway:
        answer = await post(gateway)
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_tokens_are_settled_as_used_when_the_stream_has_ended(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    async with limited(engine, tmp_path, {"tokens_per_minute": 10_000}) as gateway:
        first = await post(gateway, max_tokens=4000)
        assert first.status_code == 200
        taken = 10_000 - int(first.headers["x-ratelimit-remaining-tokens"])
        assert 4000 < taken < 4100
        await gateway.everything_released()
        second = await post(gateway, max_tokens=1)
        used = 10_000 - int(second.headers["x-ratelimit-remaining-tokens"])
        assert 0 < used < 200  # what the recording has, and the new request


async def test_a_request_that_can_never_fit_is_told_not_to_try_again(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    async with limited(engine, tmp_path, {"tokens_per_minute": 100}) as gateway:
        answer = await post(gateway, max_tokens=500)
        assert answer.status_code == 429
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        assert answer.headers["x-tokenflow-reason"] == "tokens"


@pytest.mark.parametrize("leave", ["aborts", "refused"])
async def test_a_stream_that_ends_in_any_way_frees_its_place(
    engine: ReplayEngine, tmp_path: Path, leave: str
) -> None:
    async with limited(engine, tmp_path, {"concurrent_streams": 1}) as gateway:
        if leave == "aborts":
            async with gateway.client.stream("POST", CHAT, json=asks("endless")) as answer:
                await anext(answer.aiter_bytes())
                refused = await post(gateway)
                assert refused.status_code == 429
                assert refused.headers["x-tokenflow-reason"] == "streams"
        else:
            assert (await post(gateway, model="nobody-knows-it")).status_code >= 400
        await gateway.everything_released()
        assert (await post(gateway)).status_code == 200


async def test_what_an_engine_refused_costs_no_tokens(engine: ReplayEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path, {"tokens_per_minute": 10_000}) as gateway:
        await post(gateway, model="nobody-knows-it", max_tokens=4000)
        answer = await post(gateway, max_tokens=1)
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 9_900


async def test_a_budget_outlives_a_restart(engine: ReplayEngine, tmp_path: Path) -> None:
    limits = {"budget_tokens": 700, "budget_period": "month"}
    async with limited(engine, tmp_path, limits) as gateway:
        assert (await post(gateway, max_tokens=600)).status_code == 200
        await gateway.everything_released()
    store = UsageStore(tmp_path / "usage.sqlite3")
    spent = sum(store.spent(since=0.0, tenant="anonymous").values())
    store.close()
    assert spent > 0
    async with limited(engine, tmp_path, {**limits, "budget_tokens": spent}) as gateway:
        refused = await post(gateway, max_tokens=1)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert refused.headers["x-tokenflow-reason"] == "budget"


async def test_a_keys_limits_hold_beside_its_tenants(engine: ReplayEngine, tmp_path: Path) -> None:
    narrow = make_key(tmp_path, limits=Limits(requests_per_minute=1))
    wide = make_key(tmp_path)
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    tenants = {"acme": {"limits": {"requests_per_minute": 3}}}
    async with running_gateway(entry, state_dir=tmp_path, tenants=tenants) as gateway:

        async def ask(key: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key.text}"}
            return await gateway.client.post(CHAT, json=asks(), headers=headers)

        assert (await ask(narrow)).status_code == 200
        refused = await ask(narrow)
        assert refused.status_code == 429
        assert "the key's limit of 1 requests" in refused.json()["error"]["message"]
        assert [(await ask(wide)).status_code for _ in range(3)] == [200, 200, 429]


async def test_a_rotated_key_goes_on_with_what_is_left(engine: ReplayEngine, tmp_path: Path) -> None:
    limits = Limits(requests_per_minute=2)
    old = make_key(tmp_path, limits=limits)
    new = make_key(tmp_path, limits=limits, replaces=old.key.id)
    other = make_key(tmp_path, limits=limits)
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path) as gateway:
        answers = [await post_with(gateway, key) for key in (old, new, old, new, other, other)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429, 200, 200]


async def test_a_rotated_key_has_spent_what_the_one_before_it_has(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    """After a restart, too, by the record of usage."""
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    old = make_key(tmp_path, limits=Limits(budget_tokens=100_000))
    async with running_gateway(entry, state_dir=tmp_path) as gateway:
        assert (await post_with(gateway, old)).status_code == 200
        await gateway.everything_released()
    store = UsageStore(tmp_path / "usage.sqlite3")
    spent = sum(store.spent(since=0.0, key_id=old.key.id).values())
    store.close()
    assert spent > 5
    limits = Limits(budget_tokens=spent + 5)
    new = make_key(tmp_path, limits=limits, replaces=old.key.id)
    other = make_key(tmp_path, limits=limits)
    async with running_gateway(entry, state_dir=tmp_path) as gateway:
        assert (await post_with(gateway, other, max_tokens=1)).status_code == 200
        refused = await post_with(gateway, new, max_tokens=1)
        assert (refused.status_code, refused.headers["x-tokenflow-reason"]) == (429, "budget")


async def post_with(gateway: RunningGateway, key: NewKey, **fields: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key.text}"}
    return await gateway.client.post(CHAT, json=asks(**fields), headers=headers)


async def test_openais_client_waits_as_it_is_told(engine: ReplayEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path, {"requests_per_minute": 1}) as gateway:
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.base_url}/v1", api_key="any", max_retries=0
        ) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model="chat_plain", messages=[{"role": "user", "content": "hi"}]
            )
            assert raw.headers["x-ratelimit-remaining-requests"] == "0"
            with pytest.raises(openai.RateLimitError) as raised:
                await client.chat.completions.create(
                    model="chat_plain", messages=[{"role": "user", "content": "hi"}]
                )
        assert raised.value.response.headers["x-tokenflow-reason"] == "requests"


async def test_what_passes_through_counts_too(engine: ReplayEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path, {"requests_per_minute": 1}) as gateway:
        embed = {"model": "embed", "input": "x"}
        assert (await gateway.client.post("/v1/embeddings", json=embed)).status_code == 200
        assert (await gateway.client.post("/v1/embeddings", json=embed)).status_code == 429
        assert (await post(gateway)).status_code == 429


async def test_the_refusal_has_the_dialects_shape(engine: ReplayEngine, tmp_path: Path) -> None:
    async with limited(engine, tmp_path, {"requests_per_minute": 1}) as gateway:
        await post(gateway)
        refused = await gateway.client.post("/v1/messages", json={**asks(), "max_tokens": 5})
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"


# ---- the queue -----------------------------------------------------------------------------------------


def queueing(
    engine: ReplayEngine, state: Path, **admission: object
) -> AbstractAsyncContextManager[RunningGateway]:
    entry = {"url": engine.base_url, "id": "e"}
    settings = {"enabled": True, "engine_queue": 1, **admission}
    return running_gateway(entry, state_dir=state, admission=settings)


async def busy(gateway: RunningGateway, plugin: PluginStandIn) -> None:
    """The engine has more waiting than it can begin with."""
    (engine,) = gateway.app.registry
    await eventually(lambda: engine.linked, "linked")
    plugin.tells(waiting=50)
    await eventually(lambda: engine.stats is not None and engine.stats.waiting == 50, "the engine is busy")


def rid_of(answer: httpx.Response) -> str:
    return answer.headers["x-tokenflow-stream"].partition(".")[0]


def waiting(gateway: RunningGateway) -> int:
    return sum(gateway.app.fleet.admission.waiting.values())


async def test_a_stream_waits_here_until_its_engine_has_room(engine: ReplayEngine, tmp_path: Path) -> None:
    with PluginStandIn(engine.base_url) as plugin:
        async with queueing(engine, tmp_path) as gateway:
            await busy(gateway, plugin)
            task = asyncio.create_task(post(gateway))
            await eventually(lambda: waiting(gateway) == 1, "it waits")
            assert not plugin.opened
            assert not [seen for seen in engine.requests if seen.method == "POST"]
            assert gateway.metric("tokenflow_queue_streams", sla="default") == 1
            plugin.tells(waiting=0)
            answer = await task
            assert answer.status_code == 200
            await eventually(lambda: plugin.opened == [rid_of(answer)], "it is announced, once")
            (announced,) = plugin.announced.values()
            assert announced.ttft_s < SlaClass(name="default").ttft_s, "some of it is gone"
            assert gateway.metric("tokenflow_queue_left_total", sla="default", outcome="waited") == 1


async def test_without_the_queue_it_would_wait_in_the_engine(engine: ReplayEngine, tmp_path: Path) -> None:
    """The negative control of the one before."""
    with PluginStandIn(engine.base_url) as plugin:
        async with queueing(engine, tmp_path, enabled=False) as gateway:
            await busy(gateway, plugin)
            assert (await post(gateway)).status_code == 200
            await eventually(lambda: bool(plugin.announced), "it is announced")
            (announced,) = plugin.announced.values()
            assert announced.ttft_s == SlaClass(name="default").ttft_s


async def test_a_client_that_leaves_the_queue_leaves_nothing(engine: ReplayEngine, tmp_path: Path) -> None:
    with PluginStandIn(engine.base_url) as plugin:
        async with queueing(engine, tmp_path, max_waiting=1) as gateway:
            await busy(gateway, plugin)
            task = asyncio.create_task(post(gateway))
            await eventually(lambda: waiting(gateway) == 1, "it waits")
            full = await post(gateway)
            assert full.status_code == 429
            assert full.headers["x-tokenflow-reason"] == "queue_full"
            assert full.headers["retry-after"]
            task.cancel()
            await eventually(lambda: waiting(gateway) == 0, "its place is free")
            plugin.tells(waiting=0)
            answer = await post(gateway)
            assert answer.status_code == 200
            await eventually(lambda: plugin.opened == [rid_of(answer)], "who has left was not announced")


async def in_order(
    engine: ReplayEngine, state: Path, *asked: tuple[str, dict[str, object]]
) -> list[StreamOpened]:
    """What these tenants ask for, while the engine is busy, in the order in which it gets it later on."""
    classes = {"gold": {"weight": 8}, "bronze": {}}
    tenants = {"a": {"classes": ["gold"]}, "b": {"classes": ["gold"]}, "c": {"classes": ["bronze"]}}
    keys = {name: make_key(state, name) for name in tenants}
    settings = {"state_dir": state, "classes": classes, "tenants": tenants}
    with PluginStandIn(engine.base_url) as plugin:
        async with running_gateway(
            {"url": engine.base_url, "id": "e"}, admission={"engine_queue": 1}, **settings
        ) as gateway:
            await busy(gateway, plugin)
            tasks = []
            for tenant, fields in asked:
                headers = {"authorization": f"Bearer {keys[tenant].text}"}
                tasks.append(
                    asyncio.create_task(gateway.client.post(CHAT, json=asks(**fields), headers=headers))
                )
                await eventually(lambda: waiting(gateway) == len(tasks), "it waits")
            plugin.tells(running=WELCOME.max_running)  # room for one after the other
            assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
            await eventually(lambda: len(plugin.opened) == len(tasks), "all are announced")
    return [plugin.announced[rid] for rid in plugin.opened]


async def test_a_request_that_steps_back_does_not_take_its_class_along(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    patient, bronze = {"priority": -7, "max_tokens": 1000}, ("c", {"max_tokens": 200})
    served = await in_order(engine, tmp_path, ("a", patient), ("b", {}), bronze, bronze, bronze)
    assert [stream.weight for stream in served if stream.tenant == "a"] == [1.0], "it has stepped back"
    assert [stream.tenant for stream in served] == ["a", "c", "b", "c", "c"]


async def test_a_request_that_steps_back_goes_behind_its_tenants_others(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    served = await in_order(engine, tmp_path, ("a", {"priority": -7}), ("a", {}))
    assert [stream.weight for stream in served] == [8.0, 1.0]


async def test_who_waits_for_too_long_is_told_so(engine: ReplayEngine, tmp_path: Path) -> None:
    with PluginStandIn(engine.base_url) as plugin:
        async with queueing(engine, tmp_path, max_wait_s=0.2) as gateway:
            await busy(gateway, plugin)
            late = await post(gateway)
            assert late.status_code == 504, "a proxy is not to have it wait again elsewhere"
            assert late.headers["x-tokenflow-reason"] == "queue_timeout"
            assert late.json()["error"]["code"] == "queue_timeout"
            assert waiting(gateway) == 0


def without_plugin(engine: ReplayEngine, state: Path) -> AbstractAsyncContextManager[RunningGateway]:
    """A gateway whose one engine runs one stream, and may have another waiting."""
    entry = {"url": engine.base_url, "id": "e", "link": "off", "max_running": 1}
    return running_gateway(entry, state_dir=state, admission={"enabled": True, "engine_queue": 1})


async def test_an_engine_without_plugin_gets_no_more_than_it_is_said_to_run(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    async with without_plugin(engine, tmp_path) as gateway:
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(gateway.client.stream("POST", CHAT, json=asks("endless")))
            task = asyncio.create_task(post(gateway))
            await eventually(lambda: waiting(gateway) == 1, "it waits")
            assert len(gateway.streams) == 2
        assert (await task).status_code == 200


async def test_what_is_no_stream_keeps_none_from_an_engine_without_plugin(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    async with without_plugin(engine, tmp_path) as gateway:
        (only,) = gateway.app.registry
        for _ in range(4):
            assert (await gateway.client.post("/v1/embeddings", json={"model": "embed"})).status_code == 200
        assert only.load.unseen(time.monotonic()) == 0
        assert (await post(gateway)).status_code == 200
        assert gateway.metric("tokenflow_queue_left_total", sla="default", outcome="at_once") == 1


async def test_who_reads_on_keeps_no_place_in_an_engine_that_is_done(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    slowly = {"x-tokenflow-delivery": "paced", "x-tokenflow-rate": "0.1"}
    async with without_plugin(engine, tmp_path) as gateway, AsyncExitStack() as stack:
        (only,) = gateway.app.registry
        for _ in range(2):
            read = gateway.client.stream("POST", CHAT, json=asks(), headers=slowly)
            await stack.enter_async_context(read)
        await eventually(lambda: (len(only.streams), only.at_work) == (2, 0), "the engine is done")
        assert (await post(gateway)).status_code == 200
        assert gateway.metric("tokenflow_queue_left_total", sla="default", outcome="at_once") == 3
        await eventually(lambda: (len(only.streams), only.at_work) == (2, 0), "the third is gone")


async def test_with_the_link_down_nobody_waits(engine: ReplayEngine, tmp_path: Path) -> None:
    async with queueing(engine, tmp_path) as gateway:
        with PluginStandIn(engine.base_url) as plugin:
            await busy(gateway, plugin)
            task = asyncio.create_task(post(gateway))
            await eventually(lambda: waiting(gateway) == 1, "it waits")
        assert (await task).status_code == 200


async def test_no_engine_is_said_with_a_reason(engine: ReplayEngine, tmp_path: Path) -> None:
    async with queueing(engine, tmp_path) as gateway:
        (only,) = gateway.app.registry
        only.draining = True
        refused = await post(gateway)
        assert refused.status_code == 503
        assert refused.headers["x-tokenflow-reason"] == "no_engine"
        assert "draining" in refused.json()["error"]["message"]
