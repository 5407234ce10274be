"""Keep-alives: opt-in, in two forms, between events only, and no sign of life of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import Pause, ReplayEngine, Reset, Script, Send
from support.socket_client import SocketClient
from support.transcripts import load
from support.wire import DONE, PING, check_profile, text_chunk
from tokenflow_gateway.relay.delivery import Delivery

CHAT = "/v1/chat/completions"
EVERY_S = 0.1
FORM = "X-TokenFlow-Keep-Alive"


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.recordings("models", "chat_stream", "completions_stream", "messages_stream")
    async with ReplayEngine({**scripts, "/v1/models": scripts["models"]}) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(config, keep_alive={"every_s": EVERY_S}) as gateway:
        yield gateway
        await gateway.everything_released()


def asks(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}


def silent_at(name: str, part: int, *, seconds: float = 3.5 * EVERY_S) -> Script:
    """A recording with a silence before this part of it."""
    reads = load(name).reads
    before, after = reads[:part], reads[part:]
    return Script(steps=[*(Send(r.data) for r in before), Pause(seconds), *(Send(r.data) for r in after)])


def without_pings(body: bytes) -> bytes:
    return body.replace(PING, b"")


@pytest.mark.parametrize("part", [0, 3])
async def test_case_11_silence_before_and_after_the_first_token_is_bridged(
    gateway: RunningGateway, engine: ReplayEngine, part: int
) -> None:
    """Behind a balancer with a time-out of two intervals, a client gets a ping before each is over."""
    engine.scripts["silent"] = silent_at("chat_stream", part)
    loop = asyncio.get_running_loop()
    longest, before = 0.0, loop.time()
    body = b""
    async with gateway.client.stream("POST", CHAT, json=asks("silent"), headers={FORM: "comment"}) as answer:
        async for read in answer.aiter_raw():
            now = loop.time()
            longest, before = max(longest, now - before), now
            body += read
    assert longest < 2 * EVERY_S
    assert check_profile(body, pings=True).pings >= 2
    assert without_pings(body) == load("chat_stream").data


@pytest.mark.parametrize("headers", [{}, {FORM: "none"}])
async def test_nobody_hears_what_nobody_asked_for(
    gateway: RunningGateway, engine: ReplayEngine, headers: dict[str, str]
) -> None:
    """The control of the one above, and the default."""
    engine.scripts["silent"] = silent_at("chat_stream", 3)
    answer = await gateway.client.post(CHAT, json=asks("silent"), headers=headers)
    assert answer.content == load("chat_stream").data


async def test_the_configuration_can_ask_for_all(engine: ReplayEngine) -> None:
    engine.scripts["silent"] = silent_at("chat_stream", 3)
    settings = {"form": "comment", "every_s": EVERY_S}
    async with running_gateway({"url": engine.base_url, "link": "off"}, keep_alive=settings) as gateway:
        loud = await gateway.client.post(CHAT, json=asks("silent"))
        quiet = await gateway.client.post(CHAT, json=asks("silent"), headers={FORM: "none"})
    assert PING in loud.content
    assert PING not in quiet.content


async def test_a_form_that_does_not_exist_is_400(gateway: RunningGateway) -> None:
    answer = await gateway.client.post(CHAT, json=asks("chat_stream"), headers={FORM: "often"})
    assert answer.status_code == 400
    assert "none, comment, chunk" in answer.json()["error"]["message"]


# ---- the other form --------------------------------------------------------------------------------------


async def test_an_empty_chunk_is_one_that_clients_know(gateway: RunningGateway, engine: ReplayEngine) -> None:
    engine.scripts["silent"] = silent_at("chat_stream", 0)
    answer = await gateway.client.post(CHAT, json=asks("silent"), headers={FORM: "chunk"})
    received = check_profile(answer.content)
    first = received.chunks[0]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
    assert (first["id"][:3], first["model"]) == ("tf-", "silent")
    assert received.text == check_profile(load("chat_stream").data).text


async def test_so_is_that_of_a_text_completion(gateway: RunningGateway, engine: ReplayEngine) -> None:
    engine.scripts["silent"] = silent_at("completions_stream", 2)
    request = {"model": "silent", "prompt": "x", "stream": True}
    answer = await gateway.client.post("/v1/completions", json=request, headers={FORM: "chunk"})
    chunks = check_profile(answer.content).chunks
    empty = [chunk for chunk in chunks if chunk["id"].startswith("tf-")]
    assert empty
    assert all((chunk["object"], chunk["choices"][0]["text"]) == ("text_completion", "") for chunk in empty)


async def test_messages_have_an_event_for_it(gateway: RunningGateway, engine: ReplayEngine) -> None:
    engine.scripts["silent"] = silent_at("messages_stream", 1)
    request = {"model": "silent", "stream": True, "max_tokens": 9, "messages": []}
    answer = await gateway.client.post("/v1/messages", json=request, headers={FORM: "chunk"})
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    assert ping in answer.content
    assert answer.content.replace(ping, b"") == load("messages_stream").data


@pytest.mark.parametrize("form", ["comment", "chunk"])
async def test_openais_client_reads_past_it(gateway: RunningGateway, engine: ReplayEngine, form: str) -> None:
    engine.scripts["silent"] = silent_at("chat_stream", 0)
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.base_url}/v1", api_key="none", max_retries=0, default_headers={FORM: form}
    ) as client:
        stream = await client.chat.completions.create(
            model="silent", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    assert text == check_profile(load("chat_stream").data).text


# ---- what it must not change ---------------------------------------------------------------------------


async def test_what_stands_between_events_is_not_counted(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["silent"] = silent_at("chat_stream", 0)
    await gateway.client.post(CHAT, json=asks("chat_stream"))
    await gateway.everything_released()
    alone = gateway.metric("tokenflow_delivered_tokens_total", engine="e")
    await gateway.client.post(CHAT, json=asks("silent"), headers={FORM: "chunk"})
    await gateway.everything_released()
    assert gateway.metric("tokenflow_delivered_tokens_total", engine="e") == 2 * alone
    ttft_s = gateway.metric("tokenflow_time_to_first_token_seconds_sum", engine="e")
    assert ttft_s > 3 * EVERY_S, "a keep-alive is no first token"


async def test_once_the_answer_has_begun_a_refusal_is_an_error_event(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    refuses = scenarios.error_500()
    engine.scripts["refuses"] = Script(
        status=500, headers=refuses.headers, steps=[Pause(3.5 * EVERY_S), *refuses.steps]
    )
    answer = await gateway.client.post(CHAT, json=asks("refuses"), headers={FORM: "comment"})
    assert answer.status_code == 200
    received = check_profile(answer.content, pings=True)
    assert received.error is not None
    assert received.error["message"] == "the engine gave up"
    plain = await gateway.client.post(CHAT, json=asks("refuses"))
    assert plain.status_code == 500, "the control: without keep-alives it is a status"
    assert plain.json()["error"] == received.error
    await gateway.everything_released()
    assert gateway.metric("tokenflow_streams_ended_total", engine="e", route=CHAT, reason="refused") == 2


@pytest.mark.parametrize("script", [scenarios.never_answers(), Script(steps=[Pause(0.3), Reset()])])
async def test_once_the_answer_has_begun_a_lost_engine_is_an_error_event(
    engine: ReplayEngine, script: Script
) -> None:
    engine.scripts["lost"] = script
    config = {"url": engine.base_url, "link": "off"}
    settings = {"form": "comment", "every_s": EVERY_S}
    async with running_gateway(
        config, keep_alive=settings, timeouts={"first_byte_s": 6 * EVERY_S}
    ) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("lost"))
        received = check_profile(answer.content, pings=True)
        assert received.pings >= 2
        assert received.error is not None
        assert received.error["code"] in {"engine_first_byte_timeout", "engine_connection_lost"}


async def test_a_document_hears_nothing(gateway: RunningGateway, engine: ReplayEngine) -> None:
    body = b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
    engine.scripts["document"] = Script(
        headers={"content-type": "application/json"}, steps=[Pause(3.5 * EVERY_S), Send(body)]
    )
    request = {"model": "document", "messages": []}
    answer = await gateway.client.post(CHAT, json=request, headers={FORM: "comment"})
    assert answer.content == body


async def large_event_with_a_break(engine: ReplayEngine) -> tuple[str, bytes]:
    """A client stops in the middle of an event that takes many writes, and reads on later.

    Returns the event's text, and what the client got.
    """
    text = "x" * 1_500_000
    end = text_chunk("", finish="stop")
    engine.scripts["large"] = scenarios.raw([text_chunk(text), end, DONE])
    settings = {"form": "comment", "every_s": 0.05}
    async with running_gateway({"url": engine.base_url, "link": "off"}, keep_alive=settings) as gateway:
        client = await SocketClient.ask(gateway.base_url, CHAT, asks("large"), receive_buffer=4096)
        async with asyncio.timeout(5):
            await client.got_text.wait()
        client.stop_reading()
        (stream,) = gateway.streams
        await eventually(lambda: stream.received > 0, "the engine's event is here")
        await asyncio.sleep(0.3)  # six intervals in which nothing may be written
        client.read_on()
        await eventually(lambda: client.complete, "the answer is whole")
        client.close()
    return text, bytes(client.body)


async def test_never_inside_an_event(engine: ReplayEngine) -> None:
    text, body = await large_event_with_a_break(engine)
    assert check_profile(body, pings=True).text == text


async def test_the_one_above_would_notice(engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Delivery, "between_events", True)
    text, body = await large_event_with_a_break(engine)
    with pytest.raises(AssertionError):
        assert check_profile(body, pings=True).text == text


async def test_a_reader_who_pauses_in_a_paced_stream_is_kept_connected(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """Text waits for the reader, and the connection hears something meanwhile."""
    engine.scripts["quick"] = scenarios.replay(load("chat_stream"))
    headers = {FORM: "comment", "X-TokenFlow-Delivery": "paced", "X-TokenFlow-Rate": "4"}
    loop = asyncio.get_running_loop()
    longest, before, body = 0.0, loop.time(), b""
    async with gateway.client.stream("POST", CHAT, json=asks("quick"), headers=headers) as answer:
        async for read in answer.aiter_raw():
            longest, before = max(longest, loop.time() - before), loop.time()
            body += read
    assert check_profile(body, pings=True).pings >= 2
    assert longest < 2 * EVERY_S
    assert without_pings(body) == load("chat_stream").data
