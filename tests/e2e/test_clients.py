"""The real clients against the replayed engine itself: what they make of SGLang's bytes, without a gateway.

These are the measure for the gateway: what a client sees through it must be this, or better.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from support.clients import Chat, curl, install_node_client, openai_node, openai_python
from support.replay_engine import ReplayEngine
from support.scenarios import faults, recordings, replay
from support.transcripts import load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]
STREAM = load("chat_stream_usage")
LIBRARIES = pytest.mark.parametrize("ask", [openai_python, openai_node], ids=["python", "node"])
Ask = Callable[..., Awaitable[Chat]]


@pytest.fixture(autouse=True)
async def node_client() -> None:
    await install_node_client()


@LIBRARIES
async def test_a_stream(ask: Ask) -> None:
    """Text, number of chunks, reason and usage of the recorded stream."""
    async with ReplayEngine(recordings("chat_stream_usage")) as engine:
        chat = await ask(f"{engine.base_url}/v1", "chat_stream_usage", stream=True)
    assert chat.error is None
    assert chat.text == "The capital of France is Paris."
    assert chat.finish_reason == "stop"
    assert chat.usage
    assert chat.usage["completion_tokens"] == 8
    assert chat.chunks == STREAM.data.count(b"data: {")


@LIBRARIES
async def test_a_plain_answer(ask: Ask) -> None:
    """The same text in one piece."""
    async with ReplayEngine(recordings("chat_plain")) as engine:
        chat = await ask(f"{engine.base_url}/v1", "chat_plain", stream=False)
    assert (chat.error, chat.text) == (None, "The capital of France is Paris.")


@LIBRARIES
async def test_errors_before_the_stream_keep_their_status(ask: Ask) -> None:
    """SGLang's own 400, and a 500."""
    async with ReplayEngine({**recordings("error_temperature"), **faults(STREAM)}) as engine:
        bad = await ask(f"{engine.base_url}/v1", "error_temperature", stream=True)
        broken = await ask(f"{engine.base_url}/v1", "error-500", stream=True)
    assert bad.error
    assert (bad.error.type, bad.error.status) == ("BadRequestError", 400)
    assert broken.error
    assert broken.error.status == 500


@LIBRARIES
async def test_an_error_in_the_stream_is_raised(ask: Ask) -> None:
    """The wrapped form that SGLang sends when a request times out while it runs."""
    async with ReplayEngine(recordings("chat_stream_error")) as engine:
        chat = await ask(f"{engine.base_url}/v1", "chat_stream_error", stream=True)
    assert chat.error
    assert "running timeout" in chat.error.message


@LIBRARIES
@pytest.mark.parametrize("fault", ["ends-without-done", "flat-error"])
async def test_what_clients_do_not_notice(ask: Ask, fault: str) -> None:
    """A truncated answer passes for a whole one: why the gateway has to tell."""
    async with ReplayEngine(faults(STREAM)) as engine:
        chat = await ask(f"{engine.base_url}/v1", fault, stream=True)
    assert chat.error is None
    assert chat.finish_reason is None


async def test_curl_sees_each_event_when_it_is_sent() -> None:
    """Every event is out of curl before the engine sends the next one."""
    gates = {number: asyncio.Event() for number in range(1, len(STREAM.reads))}
    events, times = [], []
    scripts = {"m": replay(STREAM, gates=gates)}
    async with ReplayEngine(scripts) as engine, curl(f"{engine.base_url}/v1", "m") as client:
        assert (client.status, client.headers["content-type"]) == (200, STREAM.headers["content-type"])
        async for at_s, event in client.events():
            events.append(event)
            times.append(at_s)
            if gate := gates.get(len(events)):
                gate.set()
        assert await client.exit_code() == 0
    assert events == [read.data for read in STREAM.reads]
    assert times == sorted(times)


async def test_curl_that_leaves_is_noticed() -> None:
    """A reader who closes the window in the middle of an endless answer."""
    async with ReplayEngine(faults(STREAM)) as engine:
        async with curl(f"{engine.base_url}/v1", "endless") as client:
            async for _ in client.events():
                break
        await engine.requests[0].disconnected.wait()


@pytest.mark.parametrize(("fault", "code"), [("closes-mid-event", 18), ("resets", 56)])
async def test_curl_tells_a_broken_stream(fault: str, code: int) -> None:
    """A body cut short, and a connection reset."""
    async with ReplayEngine(faults(STREAM)) as engine, curl(f"{engine.base_url}/v1", fault) as client:
        assert [event async for _, event in client.events()]
        assert await client.exit_code() == code
