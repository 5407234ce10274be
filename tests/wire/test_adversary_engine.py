"""Engines, or what answers on their ports, that would take memory, time or connections without bound."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator

import pytest

from support.gateway import RunningGateway, running_gateway
from support.replay_engine import Pause, Raw, ReplayEngine, Script, Send
from support.wire import DONE, check_profile, text_chunk
from tokenflow_gateway.relay import answer as answers

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
JSON = {"content-type": "application/json"}
MOST = 100_000
IDLE_S = 0.5
LONG_S = 60.0


class Endless:
    """These steps over and over, at most so many times."""

    def __init__(self, *steps: Send | Pause, times: int = 2000) -> None:
        self._steps = steps
        self._times = times

    def __iter__(self) -> Iterator[Send | Pause]:
        for _ in range(self._times):
            yield from self._steps


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    listed = Script(headers={**JSON, "content-length": str(len(MODELS))}, steps=[Send(MODELS)])
    async with ReplayEngine({"/v1/models": listed}) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    timeouts = {"first_byte_s": 2.0, "idle_s": IDLE_S}
    async with running_gateway(
        config, timeouts=timeouts, max_answer_bytes=MOST, keep_alive={"every_s": 0.1}
    ) as gateway:
        yield gateway
        await gateway.everything_released()


def asks(**fields: object) -> dict[str, object]:
    return {"model": "m", "messages": [], **fields}


# ---- answers without end ---------------------------------------------------------------------------------


async def test_a_document_without_end_is_given_up_at_the_limit(
    engine: ReplayEngine, gateway: RunningGateway
) -> None:
    engine.scripts["m"] = Script(headers=JSON, steps=Endless(Send(b"x" * 10_000)))
    answer = await gateway.client.post(CHAT, json=asks())
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_bad_stream")
    assert "max_answer_bytes" in answer.json()["error"]["message"]
    assert engine.requests[-1].sent_bytes < 10_000_000


async def test_a_small_body_that_inflates_beyond_the_limit_is_too(
    engine: ReplayEngine, gateway: RunningGateway
) -> None:
    packed = gzip.compress(b" " * 20 * MOST)
    assert len(packed) < MOST
    headers = {**JSON, "content-encoding": "gzip", "content-length": str(len(packed))}
    engine.scripts["m"] = Script(headers=headers, steps=[Send(packed)])
    answer = await gateway.client.post(CHAT, json=asks())
    assert answer.status_code == 502


async def test_a_document_of_just_the_limit_passes(engine: ReplayEngine, gateway: RunningGateway) -> None:
    body = b'{"choices":[]}'.ljust(MOST)
    engine.scripts["m"] = Script(headers=JSON, steps=[Send(body)])
    assert (await gateway.client.post(CHAT, json=asks())).content == body


@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
async def test_of_an_error_without_end_the_beginning_is_told(
    engine: ReplayEngine, gateway: RunningGateway, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_MOST_REFUSAL_BYTES", MOST)
    engine.scripts["m"] = Script(status=400, headers=JSON, steps=Endless(Send(b"x" * 10_000)))
    answer = await gateway.client.post(path, json=asks())
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "x" * 2000
    assert engine.requests[-1].sent_bytes < 10_000_000


# ---- silence ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
async def test_an_error_that_stalls_meets_the_idle_time_out(
    engine: ReplayEngine, gateway: RunningGateway, path: str
) -> None:
    headers = {**JSON, "content-length": "100"}
    engine.scripts["m"] = Script(status=500, headers=headers, steps=[Send(b'{"a"'), Pause(LONG_S)])
    answer = await gateway.client.post(path, json=asks())
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_idle_timeout")


@pytest.mark.parametrize(
    ("first", "code"),
    [([], "engine_first_byte_timeout"), ([Send(text_chunk("a"))], "engine_idle_timeout")],
)
async def test_a_passed_stream_that_only_pings_is_silent_too(
    engine: ReplayEngine, gateway: RunningGateway, first: list[Send], code: str
) -> None:
    class Steps:
        def __iter__(self) -> Iterator[Send | Pause]:
            yield from first
            yield from Endless(Send(b": ping\n\n"), Pause(0.05), times=100)

    engine.scripts["m"] = Script(steps=Steps())
    answer = await gateway.client.post(EMBEDDINGS, json=asks())
    assert code in answer.text


async def test_a_passed_stream_whose_events_keep_coming_is_not(
    engine: ReplayEngine, gateway: RunningGateway
) -> None:
    """The control of the one above."""
    steps = Endless(Send(text_chunk("a")), Pause(IDLE_S / 5), times=8)
    engine.scripts["m"] = Script(steps=steps)
    assert (await gateway.client.post(EMBEDDINGS, json=asks())).content == text_chunk("a") * 8


# ---- the end ---------------------------------------------------------------------------------------------


async def test_no_ping_behind_the_end_of_an_engine_that_closes_late(
    engine: ReplayEngine, gateway: RunningGateway
) -> None:
    stream = [Send(text_chunk("a", finish="stop")), Send(DONE), Pause(0.5)]
    engine.scripts["m"] = Script(steps=stream)
    headers = {"X-TokenFlow-Keep-Alive": "comment"}
    answer = await gateway.client.post(CHAT, json=asks(stream=True), headers=headers)
    check_profile(answer.content, pings=True)


@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
@pytest.mark.parametrize("length", [b"", b"content-length: 5\r\n"])
async def test_no_content_is_passed_on_without_a_length(
    engine: ReplayEngine, gateway: RunningGateway, path: str, length: bytes
) -> None:
    engine.scripts["m"] = Script(
        headers={"content-length": "0"}, steps=[Raw(b"HTTP/1.1 204 No Content\r\n" + length + b"\r\n")]
    )
    answer = await gateway.client.post(path, json=asks())
    assert (answer.status_code, answer.content) == (204, b"")
    assert not {"content-length", "transfer-encoding"} & set(answer.headers)


async def test_others_have_their_turn_while_a_bomb_is_unpacked(
    engine: ReplayEngine, gateway: RunningGateway
) -> None:
    packed = gzip.compress(b": x\n\n" * 1_000_000)
    headers = {
        "content-type": "text/event-stream",
        "content-encoding": "gzip",
        "content-length": str(len(packed)),
    }
    engine.scripts["m"] = Script(headers=headers, steps=[Send(packed)])
    longest, before = 0.0, asyncio.get_running_loop().time()
    asking = asyncio.create_task(gateway.client.post(CHAT, json=asks(stream=True)))
    while not asking.done():
        await asyncio.sleep(0)
        now = asyncio.get_running_loop().time()
        longest, before = max(longest, now - before), now
    assert longest < 1.0, "it takes seconds in one go"
