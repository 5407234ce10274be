"""Each phase of a request has a time-out and an error of its own; for all, by route, and by tenant."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.keys import make_key
from support.replay_engine import Hold, Pause, ReplayEngine, Script, Send
from support.socket_client import SocketClient
from support.transcripts import load
from support.wire import check_profile
from tokenflow_gateway.config import ConfigError, load_settings
from tokenflow_gateway.relay.timeouts import TimeoutTable

CHAT = "/v1/chat/completions"
LONG = 60.0


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.recordings("models", "chat_stream")
    async with ReplayEngine({**scripts, "/v1/models": scripts["models"]}) as engine:
        yield engine


def asks(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}


def ended(gateway: RunningGateway, reason: str) -> float:
    return gateway.metric("tokenflow_streams_ended_total", engine="e", route=CHAT, reason=reason)


def timed_out(gateway: RunningGateway, phase: str, route: str = CHAT) -> float:
    return gateway.metric("tokenflow_timeouts_total", route=route, phase=phase)


@contextmanager
def deaf_address() -> Iterator[str]:
    """Where a connection is neither made nor refused: a listener whose queue is full."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for sock in (first, second):
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# ---- each phase, and what it says ---------------------------------------------------------------------


async def test_no_connection_in_time_is_504(engine: ReplayEngine) -> None:
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(config, timeouts={"connect_s": 0.2}) as gateway:
        (known,) = gateway.app.registry
        with deaf_address() as address:
            object.__setattr__(known.config, "url", address)  # healthy a moment ago
            answer = await gateway.client.post(CHAT, json=asks("chat_stream"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_connect_timeout")
        assert answer.json()["error"]["type"] == "server_error"
        assert (timed_out(gateway, "connect"), ended(gateway, "engine_timeout")) == (1, 1)


@pytest.mark.parametrize("script", [scenarios.never_answers(), scenarios.never_begins()])
async def test_case_28_an_engine_that_accepts_and_never_answers_is_504(
    engine: ReplayEngine, script: Script
) -> None:
    """Another request goes on meanwhile, and the engine's connection is closed."""
    engine.scripts["silent"] = script
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(config, timeouts={"first_byte_s": 0.3}) as gateway:
        waits = asyncio.create_task(gateway.client.post(CHAT, json=asks("silent")))
        await eventually(lambda: any(seen.path == CHAT for seen in engine.requests), "the engine was asked")
        other = await gateway.client.post(CHAT, json=asks("chat_stream"))
        assert other.content == load("chat_stream").data
        assert not waits.done()
        answer = await waits
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_first_byte_timeout")
        assert "0.3 s" in answer.json()["error"]["message"]
        assert timed_out(gateway, "first_byte") == 1
        (seen,) = [seen for seen in engine.requests if seen.script_name == "silent"]
        async with asyncio.timeout(10):
            await seen.disconnected.wait()
        await gateway.everything_released()


async def test_silence_in_the_middle_is_an_error_event(engine: ReplayEngine) -> None:
    engine.scripts["stops"] = scenarios.replay(load("chat_stream"), gates={3: asyncio.Event()})
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(config, timeouts={"idle_s": 0.2}) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("stops"))
        received = check_profile(answer.content)
        assert received.error is not None
        assert received.error["code"] == "engine_idle_timeout"
        assert received.text
        assert (timed_out(gateway, "idle"), ended(gateway, "engine_timeout")) == (1, 1)


def pings_after(parts: list[bytes]) -> Script:
    """A stream that goes on with comments for ever, each well within the time-outs of these tests."""

    def steps() -> Iterator[Send | Pause]:
        yield from map(Send, parts)
        while True:
            yield Send(b": ping\n\n")
            yield Pause(0.02)

    class Steps:
        def __iter__(self) -> Iterator[Send | Pause]:
            return steps()

    return Script(steps=Steps())


@pytest.mark.parametrize(("parts", "code"), [(0, "engine_first_byte_timeout"), (3, "engine_idle_timeout")])
async def test_case_10_an_engine_that_only_pings_is_silent(
    engine: ReplayEngine, parts: int, code: str
) -> None:
    engine.scripts["pings"] = pings_after([read.data for read in load("chat_stream").reads[:parts]])
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    timeouts = {"first_byte_s": 0.4, "idle_s": 0.4}
    keep_alive = {"form": "comment", "every_s": 0.1} if parts else {}
    async with running_gateway(config, timeouts=timeouts, keep_alive=keep_alive) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("pings"))
        if parts:
            received = check_profile(answer.content, pings=True)
            assert received.error is not None
            assert received.error["code"] == code
            assert received.pings, "ours, beside the engine's"
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, code)


async def test_events_that_keep_coming_meet_no_time_out(engine: ReplayEngine) -> None:
    """The control of the one above: the same time-outs, and events instead of comments."""
    transcript = load("chat_stream")
    steps = [step for read in transcript.reads for step in (Pause(0.05), Send(read.data))]
    engine.scripts["slow"] = Script(steps=steps)
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(config, timeouts={"first_byte_s": 0.4, "idle_s": 0.4}) as gateway:
        assert len(transcript.reads) * 0.05 > 0.4
        answer = await gateway.client.post(CHAT, json=asks("slow"))
        assert check_profile(answer.content).error is None


# ---- the request as a whole ----------------------------------------------------------------------------


async def test_the_total_ends_a_stream_that_never_stops(engine: ReplayEngine) -> None:
    engine.scripts["endless"] = Script(
        steps=scenarios.endless(load("chat_stream")).steps  # no phase of it is ever late
    )
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(config, timeouts={"total_s": 0.4}) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("endless"))
        received = check_profile(answer.content)
        assert received.error is not None
        assert received.error["code"] == "request_total_timeout"
        assert (timed_out(gateway, "total"), ended(gateway, "total_timeout")) == (1, 1)


async def test_the_total_counts_the_engines_silence_too(engine: ReplayEngine) -> None:
    engine.scripts["silent"] = scenarios.never_answers()
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(config, timeouts={"total_s": 0.3}) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("silent"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_total_timeout")
        (known,) = gateway.app.registry
        assert known.healthy, "the engine is not to blame for it"


async def test_the_total_counts_from_the_arrival_of_the_head(engine: ReplayEngine) -> None:
    """A client that takes its time to send the body has the less of it for the answer."""
    engine.scripts["held"] = scenarios.replay(load("chat_stream"), gates={0: asyncio.Event()})
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(config, timeouts={"total_s": 1.0, "first_byte_s": LONG}) as gateway:
        loop = asyncio.get_running_loop()
        begun = loop.time()

        async def body() -> AsyncIterator[bytes]:
            yield b'{"model": "held", "stream": true'
            await asyncio.sleep(0.8)
            yield b', "messages": []}'

        answer = await gateway.client.post(CHAT, content=body())
        assert answer.json()["error"]["code"] == "request_total_timeout"
        assert 0.95 < loop.time() - begun < 1.7


async def test_a_client_that_reads_nothing_meets_the_total(engine: ReplayEngine) -> None:
    """Waiting for the client stops the engine's clock, and not this one."""
    engine.scripts["endless"] = scenarios.endless(load("chat_stream"))
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    times = {"total_s": 0.5, "idle_s": 0.1}
    async with running_gateway(config, timeouts=times, delivery={"max_hold_s": 1.0}) as gateway:
        client = await SocketClient.ask(gateway.base_url, CHAT, asks("endless"), receive_buffer=4096)
        async with asyncio.timeout(5):
            await client.got_text.wait()
        client.stop_reading()
        await eventually(lambda: ended(gateway, "total_timeout") == 1, "the stream is over")
        assert timed_out(gateway, "idle") == 0
        await gateway.everything_released()
        client.reset()


async def test_a_slow_body_is_counted(engine: ReplayEngine) -> None:
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(config, timeouts={"body_s": 0.2}) as gateway:
        client = await SocketClient.ask(gateway.base_url, CHAT, asks("chat_stream"), send_body=False)
        await eventually(lambda: timed_out(gateway, "body") == 1, "the body was given up")
        client.reset()


# ---- for whom ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "within_s"),
    [
        ({"timeouts": {"first_byte_s": 0.2}}, 0.2),
        ({"timeouts": {"first_byte_s": LONG}, "routes": {CHAT: {"timeouts": {"first_byte_s": 0.2}}}}, 0.2),
        (
            {
                "timeouts": {"first_byte_s": LONG},
                "routes": {CHAT: {"timeouts": {"first_byte_s": LONG}}},
                "tenants": {"anonymous": {"timeouts": {"first_byte_s": 0.2}}},
            },
            0.2,
        ),
        (
            {
                "timeouts": {"first_byte_s": 0.1},
                "routes": {CHAT: {"timeouts": {"first_byte_s": 0.4, "idle_s": 7}}},
                "tenants": {"anonymous": {"timeouts": {"idle_s": 8}}},
            },
            0.4,
        ),
    ],
)
async def test_the_narrower_setting_holds(
    engine: ReplayEngine, settings: dict[str, object], within_s: float
) -> None:
    engine.scripts["silent"] = scenarios.never_answers()
    async with running_gateway({"url": engine.base_url, "link": "off"}, **settings) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("silent"))
        assert answer.status_code == 504
        assert f"within {within_s:g} s" in answer.json()["error"]["message"]


LATE = {
    "body_s": ("chat_stream", 408, "request_timeout"),
    "connect_s": ("chat_stream", 504, "engine_connect_timeout"),
    "first_byte_s": ("silent", 504, "engine_first_byte_timeout"),
    "idle_s": ("stops", 200, "engine_idle_timeout"),
    "total_s": ("stops", 200, "request_total_timeout"),
}
"""By phase: a model with which it does not end, and what a client is told that has waited long enough."""


@pytest.mark.parametrize("by", ["route", "tenant"])
@pytest.mark.parametrize("phase", LATE)
async def test_each_phase_has_a_limit_by_route_and_by_tenant(
    engine: ReplayEngine, tmp_path: Path, phase: str, by: str
) -> None:
    """Beside a request on another route, or with another tenant's key, that came first and waits on."""
    model, status, code = LATE[phase]
    engine.scripts["silent"] = scenarios.never_answers()
    engine.scripts["stops"] = scenarios.replay(load("chat_stream"), gates={3: asyncio.Event()})
    long, short = {"timeouts": {phase: LONG}}, {"timeouts": {phase: 0.2}}
    settings: dict[str, object]
    requests: list[tuple[str, dict[str, str]]]
    if by == "route":
        settings = {**long, "routes": {CHAT: short}}
        requests = [("/v1/completions", {}), (CHAT, {})]
    else:
        settings = {**long, "routes": {CHAT: long}, "tenants": {"acme": short}}
        requests = [(CHAT, bearer(tmp_path, tenant)) for tenant in ("other", "acme")]
    config = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(config, state_dir=tmp_path, **settings) as gateway:
        with deaf_address() as address:
            if phase == "connect_s":
                (known,) = gateway.app.registry
                object.__setattr__(known.config, "url", address)  # healthy a moment ago
            waits, late = [
                await SocketClient.ask(
                    gateway.base_url,
                    path,
                    asks(model, prompt="hi"),
                    headers=headers,
                    send_body=phase != "body_s",
                )
                for path, headers in requests
            ]
            await eventually(lambda: code.encode() in late.body, f"{code} is told")
            assert late.status == status
            await eventually(lambda: timed_out(gateway, phase.removesuffix("_s")) == 1, "it is counted")
            assert b"error" not in waits.body
            assert not waits.ended.is_set()
            waits.reset()
            late.reset()
            await gateway.everything_released()


def bearer(state: Path, tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {make_key(state, tenant).text}"}


async def test_a_route_of_its_own_leaves_the_others_alone(engine: ReplayEngine) -> None:
    hold = asyncio.Event()
    engine.scripts["/v1/embeddings"] = Script(
        headers={"content-type": "application/json"}, steps=[Hold(hold), Send(b"{}")]
    )
    engine.scripts["silent"] = scenarios.never_answers()
    settings = {"routes": {CHAT: {"timeouts": {"first_byte_s": 0.2}}}}
    async with running_gateway({"url": engine.base_url, "link": "off"}, **settings) as gateway:
        other = asyncio.create_task(gateway.client.post("/v1/embeddings", json={"input": "x"}))
        assert (await gateway.client.post(CHAT, json=asks("silent"))).status_code == 504
        assert not other.done()
        hold.set()
        assert (await other).status_code == 200


async def test_a_passed_route_has_time_outs_too(engine: ReplayEngine) -> None:
    engine.scripts["/v1/embeddings"] = scenarios.never_answers()
    settings = {"routes": {"/v1/embeddings": {"timeouts": {"first_byte_s": 0.2}}}}
    async with running_gateway({"url": engine.base_url, "link": "off"}, **settings) as gateway:
        answer = await gateway.client.post("/v1/embeddings", json={"input": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_first_byte_timeout")
        assert timed_out(gateway, "first_byte", "/v1/embeddings") == 1


@pytest.mark.parametrize("routes", [{"/v1/nothing": {}}, {"chat": {}}])
def test_a_route_that_is_not_served_stops_the_start(routes: dict[str, object]) -> None:
    settings = load_settings(overrides={"engines": ["http://127.0.0.1:9"], "routes": routes})
    with pytest.raises(ConfigError, match="is not served"):
        TimeoutTable(settings)
