"""Clients that leave, in the numbered cases, and the gateway's own end: what is released, and how soon."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from support import scenarios
from support.gateway import eventually
from support.leftovers import open_files
from support.release_stage import (
    CAP,
    CHAT,
    MOMENT_S,
    QUEUEING,
    SHAPES,
    Shape,
    Stage,
    document,
    event,
    fails_visibly,
    paused,
    staged,
    told,
    until_ended,
)
from support.replay_engine import Never, Script, SeenRequest
from support.socket_client import SocketClient
from support.transcripts import load
from support.wire import check_profile


async def engines_request(stage: Stage, path: str = CHAT, *, before: int) -> SeenRequest:
    """The newest request for `path` at the engine, once there are more than `before`."""
    posts: list[SeenRequest] = []

    def here() -> bool:
        posts[:] = [seen for seen in stage.engine.requests if seen.path == path]
        return len(posts) > before

    await eventually(here, "the engine has the request")
    return posts[-1]


def posts(stage: Stage) -> int:
    return sum(seen.path == CHAT for seen in stage.engine.requests)


ENDLESS = Shape(model="endless", script=scenarios.endless(load("chat_stream")))


@pytest.mark.parametrize(
    "shape", [ENDLESS, SHAPES["silent engine"]], ids=["after three chunks", "in prefill"]
)
async def test_case_15_a_client_that_resets_stops_the_engine_within_a_second(shape: Shape) -> None:
    async with staged(replace(shape, settings={})) as stage:
        assert stage.plugin is not None
        ends = stage.plugin.closed
        client = await stage.client(shape)
        seen = await engines_request(stage, shape.path, before=1 if shape is ENDLESS else 0)
        if shape is ENDLESS:
            await eventually(lambda: client.body.count(b"\n\n") >= 3, "three chunks")
        client.reset()
        async with asyncio.timeout(1):
            await seen.disconnected.wait()
        await eventually(lambda: list(ends.values())[-1] == "client_gone", "the plugin knows", timeout_s=1)
        await stage.leftovers.none("a reset")


async def test_case_17_clients_that_leave_before_their_body_and_refused_streams_exhaust_nothing() -> None:
    busy = b'{"object":"error","message":"too many requests","type":"RateLimitError","code":429}'
    refused = Shape(model="busy", script=document(busy, status=429))
    async with staged(refused) as stage:
        for _ in range(150):
            client = await SocketClient.ask(stage.gateway.base_url, CHAT, refused.body(), send_body=False)
            client.reset()
        await stage.leftovers.none("clients that left before their body")
        assert posts(stage) == 1, "the engine never heard of them"
        for _ in range(150):
            client = await stage.client(refused)
            await until_ended(client)
            assert client.status == 429
        await stage.leftovers.none("refused streams")
        await stage.usable()


async def test_case_18_a_stream_that_is_aborted_makes_room_for_the_next() -> None:
    """A gateway with one place: it is free again as soon as the stream's client has left."""
    async with staged(replace(ENDLESS, settings={"max_connections": 1})) as stage:
        for number in range(20):
            client = await stage.client(ENDLESS)
            seen = await engines_request(stage, before=number + 1)
            await client.got_text.wait()
            if number == 0:
                refused = await stage.client(SHAPES["stream"])
                await until_ended(refused)
                assert refused.status != 200, "there is one place only"
            client.reset()
            await seen.disconnected.wait()
            await stage.leftovers.none("an aborted stream")


@pytest.mark.parametrize("later", [0, 3])
async def test_case_19_the_tokens_of_an_aborted_stream_are_accounted(later: int) -> None:
    """Ten of them have come, and the engine generates `later` more before it hears of the end."""
    ten = [event("word") for _ in range(10)]
    shape = Shape(model="ten", script=Script(steps=[*paused(ten), Never()]))
    async with staged(shape) as stage:
        assert stage.plugin is not None
        stage.plugin.generated = 10 + later
        before = stage.gateway.metric("tokenflow_generated_tokens_total", engine="e")
        client = await stage.client(shape)
        await eventually(lambda: client.body.count(b"word") == 10, "ten tokens")
        client.reset()
        await stage.leftovers.none("an aborted stream")
        generated = stage.gateway.metric("tokenflow_generated_tokens_total", engine="e") - before
        assert generated == 10 + later
        ended = stage.gateway.metric(
            "tokenflow_streams_ended_total", engine="e", route=CHAT, reason="client_gone"
        )
        assert ended == 1


@pytest.mark.parametrize("at_cap", ["hold", "abort"])
async def test_case_26_a_client_that_stops_reading_is_bounded_in_bytes(at_cap: str) -> None:
    """Held: the engine stops being read, until the client has left. Aborted: the engine is free at once."""
    delivery = {"max_buffered_bytes": CAP, "at_cap": at_cap}
    shape = replace(ENDLESS, stalls=True, settings={"delivery": delivery})
    async with staged(shape) as stage:
        client = await stage.client(shape)
        client.stop_reading()
        seen = await engines_request(stage, before=1)
        if at_cap == "hold":
            await eventually(lambda: stage.gateway.streams[0].held_bytes >= CAP, "full")
            sent, still = -1, 0
            while still < 20:
                await asyncio.sleep(MOMENT_S)
                still = still + 1 if seen.sent_bytes == sent else 0
                sent = seen.sent_bytes
                assert stage.gateway.streams[0].held_bytes < 2 * CAP
            client.reset()
        else:
            await seen.disconnected.wait()
            client.read_on()
            await until_ended(client)
            assert fails_visibly(client)
        await stage.leftovers.none(at_cap)
        reason = "client_gone" if at_cap == "hold" else "client_too_slow"
        assert (
            stage.gateway.metric("tokenflow_streams_ended_total", engine="e", route=CHAT, reason=reason) == 1
        )


# ---- the gateway's own end ------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [True, False])
async def test_a_gateway_that_goes_takes_everything_with_it(*, link: bool) -> None:
    """With a request of each kind under way, cancelled by the server at the end of a grace of no length."""
    files, tasks = open_files(), asyncio.all_tasks()
    async with staged(replace(ENDLESS, settings={"shutdown_grace_s": 0}), link=link) as stage:
        others = [shape for shape in SHAPES.values() if not (shape.uploads or shape.queued)]
        clients = [await stage.client(shape) for shape in others]
        clients += [await stage.client(ENDLESS) for _ in range(5)]
        await clients[-1].got_text.wait()
        stage.gateway.server.should_exit = True
        for client in clients:
            await until_ended(client)
        for client in clients[-5:]:
            assert client.complete
            assert b"gateway_shutdown" in client.body
            check_profile(bytes(client.body))
        engine, plugin = stage.engine, stage.plugin
    assert all(seen.done.is_set() for seen in engine.requests)
    if plugin is None:
        assert told(engine) >= 5, "the endless ones were to be aborted"
    else:
        assert not plugin.open
    await eventually(lambda: not asyncio.all_tasks() - tasks, "no task is left")
    await eventually(lambda: open_files() == files, "no descriptor is left")


async def test_a_gateway_that_goes_tells_those_who_wait() -> None:
    shape = replace(SHAPES["queued"], settings={**QUEUEING, "shutdown_grace_s": 0})
    async with staged(shape) as stage:
        client = await stage.client(shape)
        await eventually(lambda: stage.waiting == 1, "it waits")
        asked = len(stage.engine.requests)
        stage.gateway.server.should_exit = True
        await until_ended(client)
        assert client.status == 503
        assert b"gateway_shutdown" in client.body
        assert not [seen for seen in stage.engine.requests[asked:] if seen.method == "POST"]
        assert not list(stage.leftovers.of_entry())
