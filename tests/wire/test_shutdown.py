"""SIGTERM under load, on the gateway as people run it: what runs may finish, nothing is lost in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from support import scenarios
from support.gateway import eventually
from support.replay_engine import Hold, Pause, ReplayEngine, Script, Send
from support.served import Served, serving
from support.socket_client import SocketClient
from support.transcripts import load
from support.wire import check_profile

CHAT = "/v1/chat/completions"
CLIENTS = 40
PATIENCE_S = 20.0


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.recordings("models", "chat_stream")
    async with ReplayEngine({**scripts, "/v1/models": scripts["models"]}) as engine:
        yield engine


def asks(model: str) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]}


def slowly(gate: asyncio.Event | None = None) -> Script:
    """The recording within about a second; with a gate, only the first half of it until that is set."""
    reads = load("chat_stream").reads
    steps: list[Send | Pause | Hold] = []
    for number, read in enumerate(reads):
        if gate is not None and number == len(reads) // 2:
            steps.append(Hold(gate))
        steps += [Pause(1.0 / len(reads)), Send(read.data)]
    return Script(steps=steps)


def posts_to(engine: ReplayEngine) -> int:
    return sum(seen.method == "POST" for seen in engine.requests)


async def under_way(served: Served, model: str, count: int = CLIENTS) -> list[SocketClient]:
    """So many clients, each of which has got some text."""
    clients = [await SocketClient.ask(served.base_url, CHAT, asks(model)) for _ in range(count)]
    async with asyncio.timeout(PATIENCE_S):
        for client in clients:
            await client.got_text.wait()
    return clients


async def all_ended(clients: list[SocketClient]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for client in clients:
            await client.ended.wait()


async def test_case_27_sigterm_lets_running_streams_finish(engine: ReplayEngine, tmp_path: Path) -> None:
    """Readiness goes at once, newcomers are told, and every stream comes to its own end."""
    gate = asyncio.Event()
    engine.scripts["slow"] = slowly(gate)
    async with (
        serving(engine, tmp_path, grace_s=30) as served,
        httpx.AsyncClient(base_url=served.base_url, trust_env=False) as visitor,
    ):
        clients = await under_way(served, "slow")
        served.signal()
        await turned_away(visitor)
        live = await visitor.get("/health/live")
        assert (live.status_code, live.headers["connection"]) == (200, "close")
        refused = await visitor.post(CHAT, json=asks("chat_stream"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gateway_shutdown")
        assert refused.headers["retry-after"] == "2"
        assert refused.headers["connection"] == "close"
        assert served.process.returncode is None
        gate.set()
        await all_ended(clients)
        whole = load("chat_stream").data
        assert [bytes(client.body) for client in clients] == [whole] * CLIENTS
        assert all(client.complete for client in clients)
        await served.gone()
    assert '"fault in' not in served.log.read_text()
    assert "Traceback" not in served.log.read_text()


async def turned_away(visitor: httpx.AsyncClient) -> None:
    """Readiness is off: at the first look, or the one after, as the signal may be later than the look."""
    async with asyncio.timeout(1):
        while True:
            answer = await visitor.get("/health/ready")
            if answer.status_code == 503:
                assert answer.json() == {"status": "shutting down"}
                return


async def test_case_27_what_outlives_the_grace_ends_in_an_error_event(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    """Under load: streams that finish in time, some that never would, and some before their first token."""
    engine.scripts["slow"] = slowly()
    engine.scripts["endless"] = slowly(asyncio.Event())
    engine.scripts["silent"] = scenarios.never_answers()
    engine.scripts["/v1/embeddings"] = scenarios.never_answers()
    async with serving(engine, tmp_path, grace_s=2) as served:
        endless = await under_way(served, "endless")
        finishing = await under_way(served, "slow")
        silent = [await SocketClient.ask(served.base_url, CHAT, asks("silent")) for _ in range(10)]
        silent.append(await SocketClient.ask(served.base_url, "/v1/embeddings", {"input": "x"}))
        await eventually(
            lambda: sum(seen.method == "POST" for seen in engine.requests) == 2 * CLIENTS + 11,
            "all are asked",
        )
        served.signal()
        await all_ended([*endless, *finishing, *silent])
        assert all(client.complete for client in (*endless, *finishing, *silent))
        for client in finishing:
            assert bytes(client.body) == load("chat_stream").data
        for client in endless:
            received = check_profile(bytes(client.body))
            assert received.text
            assert received.error is not None
            assert received.error["code"] == "gateway_shutdown"
        assert {client.status for client in silent} == {503}
        assert all(b"gateway_shutdown" in client.body for client in silent)
        await served.gone(5)
        assert all(seen.done.is_set() for seen in engine.requests if seen.method == "POST")
    assert "Traceback" not in served.log.read_text()


async def test_a_second_signal_ends_the_grace(engine: ReplayEngine, tmp_path: Path) -> None:
    engine.scripts["endless"] = slowly(asyncio.Event())
    async with (
        serving(engine, tmp_path, grace_s=60) as served,
        httpx.AsyncClient(base_url=served.base_url, trust_env=False) as visitor,
    ):
        clients = await under_way(served, "endless", 5)
        served.signal()
        await turned_away(visitor)
        served.signal()
        assert await served.gone() < 5
        await all_ended(clients)
        for client in clients:
            error = check_profile(bytes(client.body)).error
            assert error is not None
            assert error["code"] == "gateway_shutdown"


async def test_a_client_that_does_not_read_holds_nobody_up(engine: ReplayEngine, tmp_path: Path) -> None:
    """It is cut off, so that it cannot take what it has for the whole; the others get their error event."""
    engine.scripts["flood"] = scenarios.endless(load("chat_stream"))
    engine.scripts["endless"] = slowly(asyncio.Event())
    async with serving(engine, tmp_path, grace_s=1) as served:
        stalled = await SocketClient.ask(served.base_url, CHAT, asks("flood"), receive_buffer=4096)
        async with asyncio.timeout(PATIENCE_S):
            await stalled.got_text.wait()
        stalled.stop_reading()
        (reading,) = await under_way(served, "endless", 1)
        served.signal()
        assert await served.gone() < 6
        await all_ended([reading])
        error = check_profile(bytes(reading.body)).error
        assert error is not None
        stalled.read_on()
        await all_ended([stalled])
        assert not stalled.complete


async def test_connections_that_wait_for_nothing_are_closed_at_once(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    engine.scripts["slow"] = slowly(gate)
    async with serving(engine, tmp_path, grace_s=30) as served:
        clients = await under_way(served, "slow", 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        served.signal()
        async with asyncio.timeout(2):
            await reader.read()  # the rest of the answer, and the end
        writer.close()
        assert served.process.returncode is None, "a stream is still running"
        gate.set()
        await all_ended(clients)
        await served.gone(5)


async def test_without_requests_it_goes_at_once(engine: ReplayEngine, tmp_path: Path) -> None:
    async with serving(engine, tmp_path, grace_s=30) as served:
        served.signal()
        assert await served.gone() < 3
