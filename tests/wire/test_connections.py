"""Connections of clients are bounded in number: those beyond are told, or cut off, and counted."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import ReplayEngine
from support.socket_client import SocketClient
from support.transcripts import load
from tokenflow_gateway import http_protocol
from tokenflow_gateway.config import load_settings
from tokenflow_gateway.server import server_for

CHAT = "/v1/chat/completions"


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.recordings("models", "chat_stream")
    async with ReplayEngine({**scripts, "/v1/models": scripts["models"]}) as engine:
        engine.scripts["held"] = scenarios.never_answers()
        yield engine


def asks(model: str) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]}


@contextlib.asynccontextmanager
async def full(engine: ReplayEngine, most: int) -> AsyncIterator[RunningGateway]:
    """A gateway with as many clients as it may have, all of which wait."""
    async with running_gateway({"url": engine.base_url, "link": "off"}, max_connections=most) as gateway:
        clients = [await SocketClient.ask(gateway.base_url, CHAT, asks("held")) for _ in range(most)]
        await eventually(lambda: len(gateway.streams) == most, "all are served")
        assert gateway.metric("tokenflow_client_connections") == most
        yield gateway
        for client in clients:
            client.close()
        await gateway.everything_released()


async def test_one_too_many_is_told_to_come_back(engine: ReplayEngine) -> None:
    async with full(engine, 3) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("chat_stream"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_connections")
        assert answer.headers["retry-after"] == "2"
        assert answer.headers["connection"] == "close"
        assert answer.headers["x-request-id"]
        assert gateway.metric("tokenflow_connections_refused_total") == 1
        assert len(gateway.streams) == 3
        for stream in gateway.streams:
            assert stream.end is None


async def test_there_is_room_again_once_somebody_leaves(engine: ReplayEngine) -> None:
    async with running_gateway({"url": engine.base_url, "link": "off"}, max_connections=1) as gateway:
        client = await SocketClient.ask(gateway.base_url, CHAT, asks("held"))
        await eventually(lambda: len(gateway.streams) == 1, "it is served")
        assert (await gateway.client.post(CHAT, json=asks("chat_stream"))).status_code == 503
        client.close()
        await eventually(lambda: gateway.metric("tokenflow_client_connections") == 0, "it has left")
        answer = await gateway.client.post(CHAT, json=asks("chat_stream"))
        assert answer.content == load("chat_stream").data


async def test_far_too_many_are_cut_off(engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond those that wait for their answer: else they could take all open files."""
    monkeypatch.setattr(http_protocol, "SPARE_CONNECTIONS", 2)
    async with full(engine, 1) as gateway:
        port = httpx.URL(gateway.base_url).port
        waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await eventually(lambda: gateway.metric("tokenflow_client_connections") == 3, "two wait")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert gateway.metric("tokenflow_connections_refused_total") == 3
        for _, other in [*waiting, (reader, writer)]:
            other.close()


async def test_one_that_sends_nothing_does_not_stay(
    engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_REFUSED_S", 0.2)
    async with full(engine, 1) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(gateway.base_url).port)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


@pytest.fixture
def few_files() -> Iterator[None]:
    """A limit of 1000 open files for this process, which it may not raise."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (1000, 1000)
    patched = {resource.RLIMIT_NOFILE: wanted}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda kind: patched[kind])
        patch.setattr(resource, "setrlimit", patched.__setitem__)
        yield
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize(("wanted", "given"), [(10_000, 372), (100, 100)])
def test_open_files_bound_them_too(wanted: int, given: int) -> None:
    settings = load_settings(overrides={"engines": ["http://127.0.0.1:9"], "max_connections": wanted})
    assert server_for(settings).server_state.max_connections == given
