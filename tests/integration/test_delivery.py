"""Clients that read slowly, stop, come back or leave, on real sockets; and text at the reader's pace."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any, cast

import httpx
import pytest

from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import Hold, Pause, ReplayEngine, Reset, Script, Send, Step
from support.stalling_client import stalling_client
from tokenflow_gateway.relay.pacer import LEAD_S

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
CAP = 64 * 1024
EVENTS = 5_000
"""Enough to fill everything that lies between engine and client."""


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x" * 200, "choices": [choice]}).encode() + b"\n\n"


def events(count: int) -> list[bytes]:
    return [chunk(f"{number} ") for number in range(count)]


def answer(count: int) -> list[bytes]:
    """A whole answer: `count` events of text, the finish, and the end."""
    return [*events(count), chunk("", "stop"), DONE]


def in_writes(parts: list[bytes], size: int = 40) -> Iterator[Step]:
    for at in range(0, len(parts), size):
        yield Send(b"".join(parts[at : at + size]))


class Endless:
    """Numbered events for ever."""

    def __iter__(self) -> Iterator[Step]:
        number = 0
        while True:
            yield Send(b"".join(chunk(f"{number + more} ") for more in range(40)))
            number += 40


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = {
        "/v1/models": document(b'{"object":"list","data":[]}'),
        "/model_info": document(b"{}"),
        "endless": Script(steps=Endless()),
    }
    async with ReplayEngine(scripts) as engine:
        yield engine


def document(body: bytes) -> Script:
    return Script(headers={"content-type": "application/json"}, steps=[Send(body)])


def asks(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}


def serving(engine: ReplayEngine, *, delivery: dict[str, Any] | None = None, **overrides: Any) -> Any:
    settings = {"max_buffered_bytes": CAP, **(delivery or {})}
    return running_gateway({"url": engine.base_url, "id": "e", "link": "off"}, delivery=settings, **overrides)


async def full(gateway: RunningGateway) -> None:
    await eventually(
        lambda: bool(gateway.streams) and gateway.streams[0].held_bytes >= CAP, "the queue is full"
    )


def ended(gateway: RunningGateway, reason: str) -> float:
    return gateway.metric("tokenflow_streams_ended_total", engine="e", route=CHAT, reason=reason)


def error_at_the_end(body: bytes) -> dict[str, Any]:
    assert body.endswith(DONE)
    event = body.removesuffix(DONE).split(b"\n\n")[-2]
    error: dict[str, Any] = json.loads(event.removeprefix(b"data: "))["error"]
    return error


def text_before_the_error(body: bytes) -> bytes:
    return b"".join(event + b"\n\n" for event in body.removesuffix(DONE).split(b"\n\n")[:-2])


# ---- a client that stops reading ------------------------------------------------------------------------


async def test_while_a_client_stalls_its_stream_is_counted_up_to_the_cap(engine: ReplayEngine) -> None:
    async with (
        serving(engine) as gateway,
        stalling_client(gateway.base_url, CHAT, asks("endless")),
    ):
        await full(gateway)
        (stream,) = gateway.streams
        (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
        before, still = -1, 0
        while still < 20:
            await asyncio.sleep(0.01)
            still = still + 1 if seen.sent_bytes == before else 0
            before = seen.sent_bytes
        assert CAP <= stream.held_bytes < 2.5 * CAP
        held_tokens = stream.received - stream.delivered
        assert held_tokens == pytest.approx(stream.held_bytes / len(chunk("1000 ")), rel=0.05)
        assert stream.generated == stream.received
        assert stream.reader.handed_over == stream.delivered


async def test_who_stalls_and_comes_back_has_lost_nothing(engine: ReplayEngine) -> None:
    parts = answer(EVENTS)
    engine.scripts["long"] = Script(steps=list(in_writes(parts)))
    async with (
        serving(engine, timeouts={"idle_s": 0.5}) as gateway,
        stalling_client(gateway.base_url, CHAT, asks("long")) as client,
    ):
        await full(gateway)
        await asyncio.sleep(
            0.8
        )  # longer than the engine may be silent: it is not the engine that is waited for
        for _ in range(50):
            await client.read(1000)
        await full(gateway)
        assert await client.read_all() == b"".join(parts)
        assert client.complete
        await gateway.everything_released()
        assert ended(gateway, "finished") == 1
        assert gateway.metric("tokenflow_delivered_tokens_total", engine="e") == EVENTS


async def test_at_the_cap_abort_frees_the_engine_and_tells_the_client_why(engine: ReplayEngine) -> None:
    async with (
        serving(engine, delivery={"at_cap": "abort"}) as gateway,
        stalling_client(gateway.base_url, CHAT, asks("endless")) as client,
    ):
        (seen,) = [await engine_request(engine)]
        async with asyncio.timeout(5):
            await seen.disconnected.wait()
        await eventually(lambda: ended(gateway, "client_too_slow") == 1, "the stream has ended")
        body = await client.read_all()
        error = error_at_the_end(body)
        assert error["code"] == "client_too_slow"
        assert "max_buffered_bytes" in error["message"]
        text = text_before_the_error(body)
        assert len(text) > CAP
        assert text == b"".join(events(text.count(b"\n\n")))
        await gateway.everything_released()


async def test_what_waits_after_the_end_stays_in_sight_and_not_for_long(
    engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow_gateway.relay.delivery._LAST_PATIENCE_S", 0.5)
    async with (
        serving(engine, delivery={"at_cap": "abort"}) as gateway,
        stalling_client(gateway.base_url, CHAT, asks("endless")) as client,
    ):
        await eventually(lambda: ended(gateway, "client_too_slow") == 1, "the stream has ended")
        await gateway.everything_released()
        assert CAP <= gateway.metric("tokenflow_held_bytes") < CAP + 16 * 1024
        await eventually(no_connections(gateway), "the client's connection is gone")
        assert gateway.metric("tokenflow_held_bytes") == 0
        await client.read_all()
        assert not client.complete


async def test_text_handed_over_after_the_end_of_a_stream_is_counted(engine: ReplayEngine) -> None:
    def delivered() -> float:
        return gateway.metric("tokenflow_delivered_tokens_total", engine="e")

    async with (
        serving(engine, delivery={"at_cap": "abort"}) as gateway,
        stalling_client(gateway.base_url, CHAT, asks("endless")) as client,
    ):
        await eventually(lambda: ended(gateway, "client_too_slow") == 1, "the stream has ended")
        before = delivered()
        text = text_before_the_error(await client.read_all())
        assert before < text.count(b"\n\n")
        await eventually(lambda: delivered() == text.count(b"\n\n"), "all is counted")
        assert gateway.metric("tokenflow_held_bytes") == 0


async def test_of_a_large_event_only_one_write_lies_out_of_sight(engine: ReplayEngine) -> None:
    event = chunk("b" * 3_000_000)
    engine.scripts["large"] = Script(steps=[Send(event), Send(chunk("", "stop")), Send(DONE)])
    async with (
        serving(engine) as gateway,
        stalling_client(gateway.base_url, CHAT, asks("large")) as client,
    ):
        await eventually(lambda: bool(gateway.streams) and gateway.streams[0].received == 1, "it has come")
        (stream,), (connection,) = gateway.streams, gateway.server.server_state.connections
        assert stream.held_bytes > CAP
        assert cast(Any, connection).transport.get_write_buffer_size() <= 17 * 1024
        assert stream.delivered == 0
        assert await client.read_all() == event + chunk("", "stop") + DONE


async def engine_request(engine: ReplayEngine) -> Any:
    await eventually(lambda: any(seen.path == CHAT for seen in engine.requests), "the engine has the request")
    return next(seen for seen in engine.requests if seen.path == CHAT)


async def test_who_never_comes_back_is_cut_off(
    engine: ReplayEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        serving(engine, delivery={"max_hold_s": 0.3}) as gateway,
        stalling_client(gateway.base_url, CHAT, asks("endless")) as client,
    ):
        seen = await engine_request(engine)
        async with asyncio.timeout(10):
            await seen.disconnected.wait()
        await gateway.everything_released()
        assert ended(gateway, "client_too_slow") == 1
        await eventually(no_connections(gateway), "the client's connection is gone")
        await client.read_all()
        assert not client.complete
    assert "without completing response" not in caplog.text


def no_connections(gateway: RunningGateway) -> Any:
    return lambda: not gateway.server.server_state.connections


async def test_an_answer_that_waits_for_its_client_counts_as_finished_only_when_it_is_taken(
    engine: ReplayEngine,
) -> None:
    engine.scripts["long"] = Script(steps=list(in_writes(answer(EVENTS))))
    async with (
        serving(engine, delivery={"max_buffered_bytes": 64 * 1024 * 1024, "max_hold_s": 0.3}) as gateway,
        stalling_client(gateway.base_url, CHAT, asks("long")),
    ):
        await eventually(lambda: bool(gateway.streams) and gateway.streams[0].answered, "all has come")
        await eventually(lambda: ended(gateway, "client_too_slow") == 1, "the client was given up")
        assert gateway.metric("tokenflow_aborts_total", outcome="unlinked") == 0
        assert gateway.metric("tokenflow_delivered_tokens_total", engine="e") < EVENTS
        assert gateway.metric("tokenflow_generated_tokens_total", engine="e") == EVENTS


# ---- ends while the queue is full ------------------------------------------------------------


async def test_a_client_that_leaves_with_a_full_queue_frees_everything(engine: ReplayEngine) -> None:
    async with serving(engine) as gateway:
        async with stalling_client(gateway.base_url, CHAT, asks("endless")):
            await full(gateway)
            seen = await engine_request(engine)
        async with asyncio.timeout(10):
            await seen.disconnected.wait()
        await gateway.everything_released()
        assert ended(gateway, "client_gone") == 1
        await eventually(no_connections(gateway), "the client's connection is gone")
        assert not running("_write_queue")


async def test_a_client_that_leaves_before_the_last_of_its_answer_has_not_got_it(
    engine: ReplayEngine,
) -> None:
    """What is left of it waits in the write that is under way, and nothing behind that."""

    def until_it_waits() -> Iterator[Step]:
        while not gateway.streams or all(cast(Any, client).writable for client in connections):
            yield Send(b"".join(events(10)))
            yield Pause(0)
        yield Send(chunk("", "stop") + DONE)

    async with serving(engine) as gateway:
        connections = gateway.server.server_state.connections
        engine.scripts["until"] = Script(steps=until_it_waits())
        async with stalling_client(gateway.base_url, CHAT, asks("until")):
            await eventually(lambda: bool(gateway.streams) and gateway.streams[0].answered, "all has come")
            assert 0 < gateway.streams[0].held_bytes < 16 * 1024
        await gateway.everything_released()
        assert ended(gateway, "client_gone") == 1
        assert ended(gateway, "finished") == 0


@pytest.mark.parametrize("cuts", [True, False])
async def test_an_engine_that_dies_is_told_after_the_text_before_it(
    engine: ReplayEngine, *, cuts: bool
) -> None:
    before = events(EVENTS)
    steps = [*in_writes(before), *([Reset()] if cuts else [])]
    engine.scripts["dies"] = Script(steps=steps)
    async with (
        serving(engine) as gateway,
        stalling_client(gateway.base_url, CHAT, asks("dies")) as client,
    ):
        await full(gateway)
        body = await client.read_all()
        assert client.complete
        assert error_at_the_end(body)["code"] == ("engine_connection_lost" if cuts else "stream_truncated")
        text = text_before_the_error(body)
        assert text == b"".join(events(text.count(b"\n\n")))
        assert cuts or text == b"".join(before)


async def test_a_stalled_client_does_not_hold_up_the_shutdown(engine: ReplayEngine) -> None:
    async with AsyncExitStack() as clients:
        async with serving(engine, shutdown_grace_s=0) as gateway:
            stalling = stalling_client(gateway.base_url, CHAT, asks("endless"))
            client = await clients.enter_async_context(stalling)
            await full(gateway)
        await eventually(lambda: not running("run_asgi"), "nothing is left")
        assert ended(gateway, "shutdown") == 1
        await client.read_all()
        assert not client.complete


def running(name: str) -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if name in repr(task)]


# ---- paced --------------------------------------------------------------------------------

PACED = {"x-tokenflow-delivery": "paced", "x-tokenflow-rate": "20"}


async def arrivals(gateway: RunningGateway, model: str, headers: dict[str, str]) -> tuple[list[float], bytes]:
    """When each event of text came, from the request on; and all that came."""
    times: list[float] = []
    got = b""
    started = time.monotonic()
    async with gateway.client.stream("POST", CHAT, json=asks(model), headers=headers) as response:
        async for read in response.aiter_raw():
            now = time.monotonic() - started
            times += [now] * read.count(b'"finish_reason": null')
            got += read
    return times, got


async def test_paced_text_stays_smooth_while_the_engine_stalls(engine: ReplayEngine) -> None:
    """The same engine, much faster than the reader but for a stop of a second, with and without pacing."""
    parts = answer(60)
    quick = [Send(part) for part in parts[:40]]
    engine.scripts["stalls"] = Script(steps=[*quick, Pause(1.0), *(Send(part) for part in parts[40:])])
    async with serving(engine) as gateway:
        immediate, all_at_once = await arrivals(gateway, "stalls", {})
        paced, at_pace = await arrivals(gateway, "stalls", PACED)
        assert all_at_once == at_pace == b"".join(parts)
        assert max(gap(immediate)) > 0.9
        assert max(gap(paced)) < 0.6  # 50 ms, with room for a busy machine
        assert paced[-1] - paced[0] == pytest.approx((60 - LEAD_S * 20) / 20, rel=0.25)
        assert paced[0] - immediate[0] < 0.5


def gap(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


async def test_a_pause_of_the_reader_stops_paced_text_and_its_end_lets_it_go_on(engine: ReplayEngine) -> None:
    engine.scripts["quick"] = Script(steps=[Send(part) for part in answer(200)])
    async with (
        serving(engine) as gateway,
        gateway.client.stream("POST", CHAT, json=asks("quick"), headers=PACED) as response,
    ):
        rid, _, capability = response.headers["x-tokenflow-stream"].partition(".")
        stream = gateway.streams[0]

        async def report(seq: int, **fields: object) -> None:
            body = {"capability": capability, "reports": [{"seq": seq, **fields}]}
            taken = await gateway.client.post(f"/v1/streams/{rid}/progress", json=body)
            assert taken.status_code == 200

        await eventually(lambda: stream.delivered >= 18, "text goes out at pace")
        await report(0, paused=True)
        had = stream.delivered
        await asyncio.sleep(0.4)
        assert stream.delivered == had < 200
        await report(1, tokens=had)
        await eventually(lambda: stream.delivered >= had + 3, "text goes out again")
        await report(2, rate=1000.0)
        async with asyncio.timeout(5):  # of the nine that it would take at the old pace
            body = await response.aread()
        assert body == b"".join(answer(200))


async def test_a_full_paced_queue_holds_the_engine_and_not_the_stream(engine: ReplayEngine) -> None:
    """The engine never stops: what the gateway reads of it, beyond what its client has, is what waits."""
    headers = {**PACED, "x-tokenflow-rate": "1000"}
    async with (
        serving(engine, delivery={"at_cap": "abort"}) as gateway,
        gateway.client.stream("POST", CHAT, json=asks("endless"), headers=headers) as response,
    ):
        await full(gateway)
        (stream,) = gateway.streams
        got, reads, most = b"", response.aiter_raw(), 0
        while len(got) < 3 * CAP:
            got += await anext(reads)
            most = max(most, stream.held_bytes)
        sent = events(got.count(b"\n\n") + 1)
        assert b"".join(sent).startswith(got)
        assert CAP <= most < CAP + 16 * 1024
        assert (stream.received - stream.delivered) * len(chunk("0 ")) < CAP + 16 * 1024


@asynccontextmanager
async def pausing(gateway: RunningGateway, response: httpx.Response) -> AsyncIterator[None]:
    """The reader has paused and says so again and again."""
    rid, _, capability = response.headers["x-tokenflow-stream"].partition(".")

    async def report() -> None:
        seq = 0
        while True:
            seq += 1
            body = {"capability": capability, "reports": [{"seq": seq, "tokens": 1, "paused": True}]}
            await gateway.client.post(f"/v1/streams/{rid}/progress", json=body)
            await asyncio.sleep(0.05)

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()
        await asyncio.wait((reporting,))


async def test_a_reader_who_pauses_for_long_gets_the_whole_answer(engine: ReplayEngine) -> None:
    engine.scripts["quick"] = Script(steps=[Send(part) for part in answer(60)])
    async with (
        serving(engine, delivery={"max_hold_s": 0.5}) as gateway,
        gateway.client.stream("POST", CHAT, json=asks("quick"), headers=PACED) as response,
        pausing(gateway, response),
    ):
        assert await response.aread() == b"".join(answer(60))
        await eventually(lambda: ended(gateway, "finished") == 1, "the stream has ended")


async def test_a_reader_who_pauses_for_long_is_told_of_a_failure_of_the_engine(engine: ReplayEngine) -> None:
    fails = asyncio.Event()
    engine.scripts["dies"] = Script(steps=[*(Send(part) for part in events(60)), Hold(fails), Reset()])
    async with (
        serving(engine, delivery={"max_hold_s": 0.5}) as gateway,
        gateway.client.stream("POST", CHAT, json=asks("dies"), headers=PACED) as response,
        pausing(gateway, response),
    ):
        await eventually(lambda: bool(gateway.streams) and gateway.streams[0].received == 60, "all has come")
        assert gateway.streams[0].delivered < 60
        fails.set()
        body = await response.aread()
        assert text_before_the_error(body) == b"".join(events(60))
        assert error_at_the_end(body)["code"] == "engine_connection_lost"
        assert ended(gateway, "engine_lost") == 1
        await eventually(
            lambda: gateway.metric("tokenflow_delivered_tokens_total", engine="e") == 60, "all is counted"
        )


async def test_when_the_engine_fails_a_paced_stream_ends_after_its_text(engine: ReplayEngine) -> None:
    engine.scripts["half"] = Script(steps=[Send(part) for part in events(25)])
    async with serving(engine) as gateway:
        times, body = await arrivals(gateway, "half", PACED)
        assert error_at_the_end(body)["code"] == "stream_truncated"
        assert text_before_the_error(body) == b"".join(events(25))
        assert times[-1] - times[0] > 0.3
        assert ended(gateway, "truncated") == 1


async def test_shutdown_gives_a_paced_client_what_is_there(engine: ReplayEngine) -> None:
    hold = asyncio.Event()
    engine.scripts["held"] = Script(steps=[*(Send(part) for part in events(200)), Hold(hold)])
    async with (
        serving(engine, shutdown_grace_s=0) as gateway,
        gateway.client.stream("POST", CHAT, json=asks("held"), headers=PACED) as response,
    ):
        await eventually(lambda: bool(gateway.streams) and gateway.streams[0].received == 200, "all has come")
        gateway.server.should_exit = True
        body = await response.aread()
    assert text_before_the_error(body) == b"".join(events(200))
    assert error_at_the_end(body)["code"] == "gateway_shutdown"


async def test_an_unknown_way_of_delivery_is_refused(engine: ReplayEngine) -> None:
    async with serving(engine) as gateway:
        response = await gateway.client.post(
            CHAT, json=asks("endless"), headers={"x-tokenflow-delivery": "slowly"}
        )
        assert response.status_code == 400
        assert "immediate, paced" in response.json()["error"]["message"]
        assert not [seen for seen in engine.requests if seen.path == CHAT]
