"""A new configuration without a restart: what it changes, what it leaves, and one that cannot be used."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from support import scenarios
from support.gateway import eventually, running_gateway
from support.keys import make_key, revoke_key
from support.replay_engine import ReplayEngine
from support.served import Served, serving
from support.transcripts import load
from tokenflow_gateway.config import ConfigError, Settings, load_settings
from tokenflow_gateway.reload import RELOADED, Reloader, merged
from tokenflow_gateway.store.sqlite import StoreError
from tokenflow_gateway.store.usage import USAGE_FILE, summed

CHAT = "/v1/chat/completions"


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.sglang("chat_stream")
    scripts["endless"] = scenarios.endless(load("chat_stream"))
    async with ReplayEngine(scripts) as engine:
        yield engine


def asks(model: str = "chat_stream") -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]}


def settings_of(**overrides: object) -> Settings:
    return load_settings(overrides={"engines": ["http://127.0.0.1:9"], **overrides})


def test_what_needs_a_restart_is_named_and_stays() -> None:
    old = settings_of(port=1, max_body_bytes=10)
    together, waiting = merged(old, settings_of(port=2, max_body_bytes=20, learn_rates=False))
    assert (together.port, together.learn_rates, together.max_body_bytes) == (1, True, 20)
    assert set(waiting) == {"port", "learn_rates"}
    assert Settings.model_fields.keys() >= RELOADED


def test_a_tenant_of_an_engine_that_is_not_there_yet_changes_nothing() -> None:
    """Engines change at the next start, tenants at once: every request of this one would find no engine."""
    engines = ["http://127.0.0.1:9", "http://127.0.0.1:10"]
    later = settings_of(engines=engines).engines[1].name
    new = settings_of(engines=engines, tenants={"acme": {"engines": [later]}})
    with pytest.raises(ConfigError, match=r"there is no engine .* next start"):
        merged(settings_of(), new)


async def test_the_next_request_gets_the_new_rules_and_a_stream_keeps_its_own(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    made = make_key(tmp_path, "acme")
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    common = {"engines": [entry], "port": 0, "state_dir": tmp_path}
    gold = {"classes": {"gold": {}}, "tenants": {"acme": {"classes": ["gold"]}}}
    async with running_gateway(entry, state_dir=tmp_path) as gateway:
        headers = {"authorization": f"Bearer {made.text}"}
        async with gateway.client.stream("POST", CHAT, json=asks("endless"), headers=headers) as answer:
            chunks = answer.aiter_bytes()
            assert await anext(chunks)
            (stream,) = gateway.streams
            assert gateway.app.reload(load_settings(overrides={**common, **gold})) == []
            after = await gateway.client.post(CHAT, json=asks(), headers=headers)
            assert after.headers["x-tokenflow-sla"] == "gold"
            assert stream.grant.sla.name == "default"
            assert await anext(chunks)
        await gateway.everything_released()


async def test_a_configuration_that_cannot_be_used_changes_nothing(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path) as gateway:
        before = gateway.app.settings
        bad = load_settings(
            overrides={"engines": [entry], "routes": {"/v1/nowhere": {}}, "max_body_bytes": 1}
        )
        with pytest.raises(ConfigError, match="not served"):
            gateway.app.reload(bad)
        assert gateway.app.settings is before
        assert (await gateway.client.post(CHAT, json=asks())).status_code == 200

        def unreadable() -> Settings:
            raise ConfigError("port: no")

        reloader = Reloader(unreadable, gateway.app.reload, gateway.app.fleet.remember_spent)
        assert not await reloader.reload()
        assert gateway.app.settings is before


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_new_budget_knows_what_was_spent_before_it(
    engine: ReplayEngine, tmp_path: Path, *, recorded: bool
) -> None:
    """By the record of usage. Without one, which is the negative control, the budget begins at nothing."""
    made = make_key(tmp_path, "acme")
    headers = {"authorization": f"Bearer {made.text}"}
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    common = {"engines": [entry], "port": 0, "state_dir": tmp_path, "usage": {"record": recorded}}
    async with running_gateway(entry, state_dir=tmp_path, usage={"record": recorded}) as gateway:
        assert (await gateway.client.post(CHAT, json=asks(), headers=headers)).status_code == 200
        if recorded:
            await eventually(lambda: spent(tmp_path) > 5, "the stream is on record")
        budget = {"limits": {"budget_tokens": 15}}
        settings = load_settings(overrides={**common, "tenants": {"acme": budget}})
        reloader = Reloader(lambda: settings, gateway.app.reload, gateway.app.fleet.remember_spent)
        assert await reloader.reload()
        answer = await gateway.client.post(CHAT, json={**asks(), "max_tokens": 5}, headers=headers)
        assert answer.status_code == (429 if recorded else 200)


def spent(state: Path) -> int:
    """Tokens on record."""
    try:
        (total,) = summed(state / USAGE_FILE, by=())
    except StoreError:  # it is being made
        return 0
    return int(total["prompt"] + total["generated"])


async def status_of(served: Served, bearer: str) -> int:
    async with httpx.AsyncClient(base_url=served.base_url, trust_env=False, timeout=10) as client:
        answer = await client.get("/v1/models", headers={"authorization": f"Bearer {bearer}"})
        return answer.status_code


async def test_all_workers_notice_a_revocation(
    engine: ReplayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection may reach another worker: from two seconds on none of them lets the key in."""
    state = tmp_path / "state"
    monkeypatch.setenv("TOKENFLOW_STATE_DIR", str(state))
    made, kept = make_key(state), make_key(state)
    async with serving(engine, tmp_path, workers=2) as served:
        assert {await status_of(served, made.text) for _ in range(10)} == {200}
        revoke_key(state, made)
        async with asyncio.timeout(5):
            while {await status_of(served, made.text) for _ in range(20)} != {401}:
                pass  # each asks whichever worker takes the connection
        assert {await status_of(served, kept.text) for _ in range(10)} == {200}


def classes_in(config: Path, text: str) -> None:
    kept = [line for line in config.read_text().splitlines() if not line.startswith(("classes", "tenants"))]
    config.write_text("\n".join([*kept, text]) + "\n")


async def class_of(client: httpx.AsyncClient) -> str | None:
    answer = await client.post(CHAT, json=asks())
    assert answer.status_code == 200
    return answer.headers.get("x-tokenflow-sla")


async def until_class(served: Served, name: str, *, times: int = 1) -> None:
    """So many connections, one after the other, are answered by this class: whichever workers they reach."""
    async with asyncio.timeout(10):
        in_a_row = 0
        while in_a_row < times:
            async with httpx.AsyncClient(base_url=served.base_url, trust_env=False) as client:
                in_a_row = in_a_row + 1 if await class_of(client) == name else 0
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("workers", [1, 2])
async def test_sighup_reloads_and_drops_no_stream(
    engine: ReplayEngine, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENFLOW_STATE_DIR", str(tmp_path / "state"))
    config = tmp_path / "gateway.yaml"
    async with (
        serving(engine, tmp_path, workers=workers) as served,
        httpx.AsyncClient(base_url=served.base_url, trust_env=False, timeout=10) as client,
        client.stream("POST", CHAT, json=asks("endless")) as answer,
    ):
        chunks = answer.aiter_bytes()
        assert await anext(chunks)
        classes_in(config, "classes: {gold: {weight: 0}}")
        os.kill(served.process.pid, signal.SIGHUP)
        await eventually(lambda: "nothing has changed" in served.log.read_text(), "the bad file is refused")
        assert "classes.gold.weight" in served.log.read_text()
        assert await class_of(client) is None
        classes_in(
            config,
            "classes: {gold: {}}\ntenants: {anonymous: {classes: [gold]}}\nmax_connections: 77",
        )
        os.kill(served.process.pid, signal.SIGHUP)
        await until_class(served, "gold", times=12)
        assert "max_connections" in served.log.read_text()
        assert await anext(chunks)
    assert served.log.read_text().count("a worker has ended") == 0
