"""Another engine is asked while the first has done nothing, and never once the client has text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.plugin_stand_in import PluginStandIn
from support.replay_engine import Close, Headers, Pause, ReplayEngine, Reset, Script, Send
from support.transcripts import load
from support.wire import check_profile

CHAT = "/v1/chat/completions"
BUSY = Script(
    status=503,
    headers={"content-type": "application/json", "content-length": "36"},
    steps=[Send(b'{"object":"error","message":"full!"}')],
)
BUSY_IN_THE_STREAM = Script(
    steps=[
        Send(b'data: {"error":{"object":"error","message":"The request queue is full.","code":503}}\n\n'),
        Send(b"data: [DONE]\n\n"),
    ]
)
"""SGLang's: it has answered 200 before it asks its scheduler (serving_chat.py)."""
BEFORE_THE_ANSWER = {
    "reset": (Script(steps=[Reset()]), "lost"),
    "closed": (Script(steps=[Close()]), "lost"),
    "closed after the head": (Script(steps=[Headers(), Close()]), "lost"),
    "reset amid the first event": (Script(steps=[Send(b'data: {"id"'), Reset()]), "lost"),
    "busy": (BUSY, "busy"),
    "busy in the stream": (BUSY_IN_THE_STREAM, "busy"),
}


@pytest.fixture
async def engines() -> AsyncIterator[tuple[ReplayEngine, ReplayEngine]]:
    """The first is asked first, by a new gateway."""
    scripts = scenarios.recordings("models", "chat_stream", "chat_plain")
    scripts = {**scripts, "/v1/models": scripts["models"], "m": scripts["chat_stream"]}
    async with ReplayEngine(scripts) as first, ReplayEngine(scripts) as second:
        yield first, second


@contextlib.asynccontextmanager
async def serving(*engines: ReplayEngine, **settings: object) -> AsyncIterator[RunningGateway]:
    entries = [
        {"url": engine.base_url, "id": name, "link": "off"}
        for name, engine in zip("abc", engines, strict=False)
    ]
    async with running_gateway(*entries, **settings) as gateway:
        yield gateway
        await gateway.everything_released()


def asks(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}


def posts_to(engine: ReplayEngine, path: str = CHAT) -> int:
    return sum(seen.method == "POST" and seen.path == path for seen in engine.requests)


def retries(gateway: RunningGateway, reason: str) -> float:
    return gateway.metric("tokenflow_retries_total", engine="a", reason=reason)


@pytest.mark.parametrize("what", BEFORE_THE_ANSWER)
async def test_before_the_first_event_another_engine_is_asked(
    engines: tuple[ReplayEngine, ReplayEngine], what: str
) -> None:
    script, reason = BEFORE_THE_ANSWER[what]
    engines[0].scripts["m"] = script
    async with serving(*engines) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("m"))
        assert answer.content == load("chat_stream").data
        await gateway.everything_released()
        assert (posts_to(engines[0]), posts_to(engines[1])) == (1, 1)
        assert retries(gateway, reason) == 1
        ended = "tokenflow_streams_ended_total"
        assert gateway.metric(ended, engine="a", route=CHAT, reason="retried") == 1
        assert gateway.metric(ended, engine="b", route=CHAT, reason="finished") == 1


async def test_an_engine_that_is_gone_is_passed_over(engines: tuple[ReplayEngine, ReplayEngine]) -> None:
    async with serving(*engines) as gateway:
        gone = next(iter(gateway.app.registry))
        object.__setattr__(gone.config, "url", "http://127.0.0.1:9")  # healthy a moment ago
        while retries(gateway, "refused") == 0:
            gone.healthy = True  # its probe may have been quicker
            answer = await gateway.client.post(CHAT, json=asks("m"))
            assert answer.content == load("chat_stream").data


async def test_the_control_one_engine_alone_is_an_error(engines: tuple[ReplayEngine, ReplayEngine]) -> None:
    engines[0].scripts["m"] = Script(steps=[Reset()])
    async with serving(engines[0]) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("m"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_connection_lost")
        assert retries(gateway, "lost") == 0


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_attempts_are_bounded(engines: tuple[ReplayEngine, ReplayEngine], most: int) -> None:
    async with ReplayEngine(engines[0].scripts) as third:
        for engine in (*engines, third):
            engine.scripts["m"] = BUSY
        async with serving(*engines, third, max_attempts=most) as gateway:
            answer = await gateway.client.post(CHAT, json=asks("m"))
            assert answer.status_code == 503, "the last one's own answer"
            assert answer.json()["error"]["message"] == "full!"
            assert sum(map(posts_to, (*engines, third))) == most


async def test_an_engine_without_the_model_is_not_asked(engines: tuple[ReplayEngine, ReplayEngine]) -> None:
    engines[0].scripts["other"] = Script(steps=[Reset()])
    listed = b'{"object":"list","data":[{"id":"other","object":"model"}]}'
    headers = {"content-type": "application/json", "content-length": str(len(listed))}
    engines[0].scripts["/v1/models"] = Script(headers=headers, steps=[Send(listed)])
    async with serving(*engines) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("other"))
        assert answer.status_code == 502
        assert posts_to(engines[1]) == 0


async def test_the_last_busy_ones_error_is_the_clients_status(
    engines: tuple[ReplayEngine, ReplayEngine],
) -> None:
    engines[0].scripts["m"] = engines[1].scripts["m"] = BUSY_IN_THE_STREAM
    async with serving(*engines) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("m"))
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "The request queue is full."
        assert sum(map(posts_to, engines)) == 2


@pytest.mark.parametrize("most", [1, 2])
async def test_a_request_that_kills_engines_kills_each_once_and_one_of_them_twice_at_most(
    engines: tuple[ReplayEngine, ReplayEngine], most: int
) -> None:
    """It dies at once, so that a kept connection looks as if it had been closed before."""
    async with serving(*engines, max_attempts=most) as gateway:
        for _ in range(2):
            await asyncio.gather(*(gateway.client.post(CHAT, json=asks("chat_stream")) for _ in range(6)))
        for engine in engines:
            engine.scripts["m"] = Script(steps=[Close()])
        before = sum(map(posts_to, engines))
        answer = await gateway.client.post(CHAT, json=asks("m"))
        assert answer.status_code == 502
        assert sum(map(posts_to, engines)) - before == most + 1


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_what_an_engine_has_worked_on_is_not_asked_again_on_it(
    engines: tuple[ReplayEngine, ReplayEngine], path: str
) -> None:
    """The connection was kept from a request before; it is lost well after this one has come."""
    async with serving(engines[0], max_attempts=1) as gateway:
        await gateway.client.post(CHAT, json=asks("chat_stream"))
        engines[0].scripts["m"] = Script(steps=[Pause(0.4), Close()])
        answer = await gateway.client.post(path, json={"model": "m", "messages": [], "input": ""})
        assert answer.status_code == 502
        assert posts_to(engines[0], path) == 1 + (path == CHAT)


# ---- what is never asked again --------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Reset(), Close()])
async def test_case_25_text_that_was_sent_is_never_replayed(
    engines: tuple[ReplayEngine, ReplayEngine], end: Reset | Close
) -> None:
    transcript = load("chat_stream")
    sent = [Send(read.data) for read in transcript.reads[:6]]
    engines[0].scripts["m"] = Script(steps=[*sent, end])
    async with serving(*engines) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("m"))
        received = check_profile(answer.content)
        assert received.error is not None
        assert received.error["code"] == "engine_connection_lost"
        assert received.text
        whole = check_profile(transcript.data).text
        assert whole.startswith(received.text)
        assert posts_to(engines[1]) == 0


async def test_nor_once_a_keep_alive_was_sent(engines: tuple[ReplayEngine, ReplayEngine]) -> None:
    gate = asyncio.Event()
    engines[0].scripts["m"] = scenarios.resets(load("chat_stream"), after_reads=0, gate=gate)
    settings = {"form": "comment", "every_s": 0.05}
    async with (
        serving(*engines, keep_alive=settings) as gateway,
        gateway.client.stream("POST", CHAT, json=asks("m")) as answer,
    ):
        reads = answer.aiter_raw()
        body = await anext(reads)
        gate.set()
        async for read in reads:
            body += read
        assert check_profile(body, pings=True).error is not None
        assert posts_to(engines[1]) == 0


@pytest.mark.parametrize(
    ("path", "again"), [(CHAT, False), ("/v1/embeddings", False), ("/v1/responses/resp_1", True)]
)
async def test_what_may_have_been_done_is_not_asked_again(
    engines: tuple[ReplayEngine, ReplayEngine], path: str, *, again: bool
) -> None:
    """A document of an engine whose progress nobody knows, an embedding; reading something is no deed."""
    for engine, script in zip(engines, (Script(steps=[Reset()]), document(b"{}")), strict=True):
        engine.scripts["m"] = engine.scripts[path] = script
    async with serving(*engines) as gateway:
        if again:
            answer = await gateway.client.get(path)
        else:
            answer = await gateway.client.post(path, json={"model": "m", "messages": [], "input": ""})
        assert answer.status_code == (200 if again else 502)
        assert bool([seen for seen in engines[1].requests if seen.path == path]) is again


async def test_a_busy_engine_did_nothing_whatever_was_asked(
    engines: tuple[ReplayEngine, ReplayEngine],
) -> None:
    engines[0].scripts["/v1/embeddings"] = BUSY
    engines[1].scripts["/v1/embeddings"] = document(b"{}")
    async with serving(*engines) as gateway:
        answer = await gateway.client.post("/v1/embeddings", json={"input": ""})
        assert answer.status_code == 200
        assert retries(gateway, "busy") == 1


async def test_a_silent_engine_is_not_asked_twice(engines: tuple[ReplayEngine, ReplayEngine]) -> None:
    """It may be generating: its time-out is the client's answer."""
    engines[0].scripts["m"] = scenarios.never_answers()
    async with serving(*engines, timeouts={"first_byte_s": 0.2}) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("m"))
        assert answer.json()["error"]["code"] == "engine_first_byte_timeout"
        assert posts_to(engines[1]) == 0


# ---- what the links are told -----------------------------------------------------------------------------


async def test_each_plugin_is_told_of_its_own_attempt(engines: tuple[ReplayEngine, ReplayEngine]) -> None:
    engines[0].scripts["m"] = BUSY
    entries = [{"url": engine.base_url, "id": name} for name, engine in zip("ab", engines, strict=True)]
    with PluginStandIn(engines[0].base_url) as first, PluginStandIn(engines[1].base_url) as second:
        async with running_gateway(*entries) as gateway:
            await eventually(lambda: all(e.linked for e in gateway.app.registry), "both are linked")
            answer = await gateway.client.post(CHAT, json=asks("m"))
            assert answer.status_code == 200
            await gateway.everything_released()
            (on_first,), (on_second,) = first.opened, second.opened
            assert first.closed == {on_first: "retried"}
            assert second.closed == {on_second: "finished"}
            assert on_first != on_second
            assert answer.headers["x-tokenflow-stream"].startswith(on_second)


def document(body: bytes) -> Script:
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    return Script(headers=headers, steps=[Send(body)])
