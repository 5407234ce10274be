"""`tokenflow engines` at a running gateway, and what draining and the breaker do to its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner, Result

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import ReplayEngine, Reset, Script
from support.transcripts import load
from tokenflow_gateway.cli import cli
from tokenflow_gateway.config import ANONYMOUS

CHAT = "/v1/chat/completions"
TOKEN = "secret"


@pytest.fixture
async def engines() -> AsyncIterator[tuple[ReplayEngine, ReplayEngine]]:
    scripts = scenarios.recordings("chat_stream", "models")
    scripts["/v1/models"] = scripts["models"]
    scripts["endless"] = scenarios.endless(load("chat_stream"))
    async with ReplayEngine(dict(scripts)) as one, ReplayEngine(dict(scripts)) as other:
        yield one, other


@pytest.fixture
async def gateway(engines: tuple[ReplayEngine, ReplayEngine]) -> AsyncIterator[RunningGateway]:
    entries = [
        {"url": engine.base_url, "id": name, "link": "off"}
        for name, engine in zip(("one", "other"), engines, strict=True)
    ]
    async with running_gateway(*entries, admin_token=TOKEN) as gateway:
        yield gateway


async def run(gateway: RunningGateway, *arguments: str, token: str = TOKEN) -> Result:
    argv = ["engines", *arguments, "--gateway", gateway.base_url, "--token", token]
    return await asyncio.to_thread(CliRunner().invoke, cli, argv)


def asks(model: str = "chat_stream", text: str = "hi") -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": text}]}


def generations(engine: ReplayEngine) -> int:
    return sum(seen.path == CHAT for seen in engine.requests)


async def test_a_drained_engine_finishes_what_it_has_and_gets_nothing_new(
    gateway: RunningGateway, engines: tuple[ReplayEngine, ReplayEngine]
) -> None:
    by_name = dict(zip(("one", "other"), engines, strict=True))
    async with gateway.client.stream("POST", CHAT, json=asks("endless")) as answer:
        reads = answer.aiter_bytes()
        await anext(reads)
        (stream,) = gateway.streams
        name, rest = stream.engine.name, "other" if stream.engine.name == "one" else "one"
        drained = await run(gateway, "drain", name)
        assert drained.exit_code == 0, drained.output
        listed = await run(gateway, "list")
        assert [line.split()[:2] for line in listed.output.splitlines() if line.startswith(name)] == [
            [name, "draining"]
        ]
        for number in range(6):
            assert (await gateway.client.post(CHAT, json=asks(text=str(number)))).status_code == 200
        assert generations(by_name[name]) == 1
        assert generations(by_name[rest]) == 6
        before = stream.received
        while stream.received == before:  # it goes on
            await anext(reads)
    assert (await run(gateway, "resume", name)).exit_code == 0
    for number in range(20):
        await gateway.client.post(CHAT, json=asks(text=str(number)))
    assert generations(by_name[name]) > 1


async def test_what_goes_wrong_is_one_line(gateway: RunningGateway) -> None:
    unknown = await run(gateway, "drain", "nobody")
    assert (unknown.exit_code, unknown.output) == (1, "Error: no engine is called 'nobody'\n")
    refused = await run(gateway, "list", token="wrong")
    assert refused.exit_code == 1
    assert "admin" in refused.output


async def test_an_engine_that_drops_every_connection_is_left_alone(
    gateway: RunningGateway, engines: tuple[ReplayEngine, ReplayEngine]
) -> None:
    """Its health probe finds it well all the while."""
    broken, well = engines
    broken.scripts["chat_stream"] = Script(headers={}, steps=[Reset()])
    for number in range(12):
        answer = await gateway.client.post(CHAT, json=asks(text=str(number)))
        assert answer.status_code == 200  # the other one is asked
    asked = generations(broken)
    assert asked <= 4  # three, and perhaps a trial
    assert gateway.metric("tokenflow_engine_breaker_open", engine="one") == 1
    broken.scripts["chat_stream"] = well.scripts["chat_stream"]

    async def closed() -> None:
        number = 0
        while gateway.metric("tokenflow_engine_breaker_open", engine="one"):
            number += 1
            await gateway.client.post(CHAT, json=asks(text=f"again {number}"))
            await asyncio.sleep(0.05)

    async with asyncio.timeout(10):
        await closed()
    await eventually(lambda: generations(broken) > asked, "it was tried")


SOON = {"timeouts": {"first_byte_s": 0.1}}


@pytest.mark.parametrize(
    ("settings", "opens"), [(SOON, 1), ({"tenants": {ANONYMOUS: SOON}}, 0)], ids=["of all", "of one tenant"]
)
async def test_a_tenants_own_impatience_closes_no_engine_to_the_others(
    engines: tuple[ReplayEngine, ReplayEngine], settings: dict[str, object], opens: int
) -> None:
    silent, _ = engines
    silent.scripts["chat_stream"] = scenarios.never_answers()
    entry = {"url": silent.base_url, "id": "one", "link": "off"}
    async with running_gateway(entry, **settings) as gateway:
        for _ in range(4):
            assert (await gateway.client.post(CHAT, json=asks())).status_code == 504
        assert gateway.metric("tokenflow_engine_breaker_open", engine="one") == opens
