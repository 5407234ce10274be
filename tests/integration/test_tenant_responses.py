"""Stored responses of tenants: there for their own alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from support import scenarios
from support.gateway import RunningGateway, running_gateway
from support.keys import make_key
from support.replay_engine import ReplayEngine, Script, Send
from support.tenants import bearer, last_post, serving, until_answered
from tokenflow_gateway.tenants.keys import NewKey

STORED = Script(headers={"content-type": "application/json"}, steps=[Send(b'{"id":"it"}')])
RESPONSES = "/v1/responses"


async def respond(
    gateway: RunningGateway, made: NewKey, model: str = "responses_stream", **fields: object
) -> httpx.Response:
    asked = {"model": model, "input": "hi", "stream": True, **fields}
    return await gateway.client.post(RESPONSES, json=asked, headers=bearer(made))


@pytest.fixture
async def storing() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.sglang("chat_stream") | scenarios.recordings("responses_stream") | {"queued": STORED}
    async with ReplayEngine(scripts) as engine:
        yield engine


def asked_for(engine: ReplayEngine) -> int:
    """How often the engine was asked for responses."""
    return sum(seen.path.startswith(RESPONSES) for seen in engine.requests)


def name_of(engine: ReplayEngine) -> str:
    """The id by which the engine has stored the response that it was last asked for, which it can find."""
    rid: str = last_post(engine).json()["request_id"]
    engine.scripts |= {f"{RESPONSES}/{rid}": STORED, f"{RESPONSES}/{rid}/cancel": STORED}
    return rid


@pytest.mark.parametrize("background", [False, True])
async def test_a_stored_response_is_there_for_its_tenant_alone(
    storing: ReplayEngine, tmp_path: Path, *, background: bool
) -> None:
    mine, colleagues, theirs = (make_key(tmp_path, tenant) for tenant in ("acme", "acme", "low"))
    async with serving(storing, tmp_path) as gateway:
        if background:
            await respond(gateway, mine, "queued", stream=False, background=True)
        else:
            answer = await respond(gateway, mine)
            assert answer.headers["x-tokenflow-stream"].startswith(last_post(storing).json()["request_id"])
        path = f"{RESPONSES}/{name_of(storing)}"
        for method, at in (("GET", path), ("POST", f"{path}/cancel"), ("DELETE", path)):
            before = asked_for(storing)
            for spelled in (at, at.replace("resp_", "resp%5F")):
                refused = await gateway.client.request(method, spelled, headers=bearer(theirs))
                assert refused.status_code == 404
                assert refused.json()["error"]["code"] == "response_not_found"
            assert asked_for(storing) == before, "no engine was asked"
            for made in (mine, colleagues):
                found = await gateway.client.request(method, at, headers=bearer(made))
                assert (found.status_code, found.json()) == (200, {"id": "it"})


async def test_nobody_goes_on_from_a_response_of_others(storing: ReplayEngine, tmp_path: Path) -> None:
    mine, theirs = make_key(tmp_path, "acme"), make_key(tmp_path, "low")
    async with serving(storing, tmp_path) as gateway:
        await respond(gateway, mine)
        rid = name_of(storing)
        before = asked_for(storing)
        for background in ({}, {"stream": False, "background": True}):
            refused = await respond(gateway, theirs, previous_response_id=rid, **background)
            assert refused.status_code == 404
            assert refused.json()["error"]["param"] == "previous_response_id"
        spelled = f'{{"model":"responses_stream","input":"hi","previous_response\\u005fid":"{rid}"}}'
        refused = await gateway.client.post(RESPONSES, content=spelled, headers=bearer(theirs))
        assert refused.status_code == 404
        assert asked_for(storing) == before, "no engine was asked"
        assert (await respond(gateway, mine, previous_response_id=rid)).status_code == 200
        assert last_post(storing).json()["previous_response_id"] == rid


async def test_no_tenant_names_its_response_as_others_have(storing: ReplayEngine, tmp_path: Path) -> None:
    mine, theirs = make_key(tmp_path, "acme"), make_key(tmp_path, "low")
    async with serving(storing, tmp_path) as gateway:
        await respond(gateway, mine)
        rid = name_of(storing)
        for more in ({}, {"model": "queued", "stream": False, "background": True}):
            await respond(gateway, theirs, request_id=rid, **more)
            assert last_post(storing).json()["request_id"] not in {rid, None}


async def test_whose_a_response_is_all_gateways_of_one_secret_know(
    storing: ReplayEngine, tmp_path: Path
) -> None:
    """A gateway that begins anew, and another one; not one that nobody has told the secret."""
    mine, theirs = make_key(tmp_path, "acme"), make_key(tmp_path, "low")
    async with serving(storing, tmp_path) as gateway:
        await respond(gateway, mine)
        path = f"{RESPONSES}/{name_of(storing)}"

    async def status(made: NewKey, **settings: object) -> int:
        async with serving(storing, tmp_path, **settings) as gateway:
            return (await gateway.client.get(path, headers=bearer(made))).status_code

    assert (await status(mine), await status(theirs)) == (200, 404)
    assert await status(mine, link_secret="another secret") == 404


async def test_without_keys_responses_pass_by_any_id(storing: ReplayEngine, tmp_path: Path) -> None:
    """The negative control: there is one tenant, and its ids may be of the engine's own making."""
    storing.scripts[f"{RESPONSES}/resp_1"] = STORED
    entry = {"url": storing.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path) as gateway:
        assert (await gateway.client.get(f"{RESPONSES}/resp_1")).status_code == 200
        asked = {"model": "responses_stream", "input": "hi", "stream": True, "previous_response_id": "resp_1"}
        assert (await gateway.client.post(RESPONSES, json=asked)).status_code == 200
        made = make_key(tmp_path)
        await until_answered(gateway, None, 401)
        assert (await gateway.client.get(f"{RESPONSES}/resp_1", headers=bearer(made))).status_code == 404
