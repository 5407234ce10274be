"""The gateway's end of the link against the engine's real end, with the test in place of the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import ReplayEngine
from support.transcripts import load
from tokenflow_engine.control.endpoint import default_endpoint, link_secret
from tokenflow_engine.control.owners import Confirmation, Delivery, Replaced, Update
from tokenflow_engine.control.server import LinkServer
from tokenflow_engine.protocol import (
    PROTOCOL_VERSION,
    Aborted,
    Consumption,
    EngineStats,
    Reading,
    SetPolicy,
    StreamClosed,
    StreamOpened,
    Welcome,
    encode,
)
from tokenflow_gateway import lifecycle
from tokenflow_gateway.engines.engine import Engine

CHAT = "/v1/chat/completions"
WELCOME = Welcome(
    version=PROTOCOL_VERSION,
    engine_id="e-1",
    model="m",
    engine="sglang 0.5.23",
    capabilities=["count", "abort", "buffer"],
    kv_tokens=1000,
    max_running=8,
)
STATS = EngineStats(
    at=0.0,
    running=3,
    waiting=2,
    parked=0,
    kv_used_tokens=400,
    kv_tokens=1000,
    tokens_per_s=12.34,
    generated_total=5,
)


class Plugin:
    """The engine's side of the link, driven by the test."""

    def __init__(self, endpoint: str, *, secret: str | None = None, engine_id: str = "e-1") -> None:
        welcome = Welcome(**{**_fields(WELCOME), "engine_id": engine_id})
        self._server = LinkServer(endpoint, secret=secret or link_secret(), welcome=welcome, stats=STATS)
        self._server.start()
        self.heard: list[Delivery] = []

    def listen(self) -> list[Delivery]:
        self.heard += self._server.receive(limit=100)
        return self.heard

    def opened(self) -> list[str]:
        return [d.message.rid for d in self.listen() if isinstance(d.message, StreamOpened)]

    def closed(self) -> dict[str, str]:
        return {d.message.rid: d.message.reason for d in self.listen() if isinstance(d.message, StreamClosed)}

    def readings(self, rid: str) -> list[Reading]:
        batches = [d.message.readings for d in self.listen() if isinstance(d.message, Consumption)]
        return [reading for batch in batches for reading in batch if reading.rid == rid]

    def report(self, rid: str, state: str, generated: int) -> None:
        owner = self.heard[-1].owner
        self._server.post([Update(owner, rid, state, generated)], is_urgent=True)  # type: ignore[arg-type]

    def confirm(self, rid: str, *, generated: int, was_live: bool = True) -> None:
        owner = self.heard[-1].owner
        self._server.confirm(Confirmation(owner, Aborted(rid=rid, generated=generated, was_live=was_live)))

    def tell(self, **stats: int) -> None:
        """Statistics with these values, from the next beat on."""
        self._server.stats = msgspec.structs.replace(STATS, **stats)

    def close(self) -> None:
        self._server.close()


def _fields(message: Welcome) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


@contextmanager
def plugin(engine: ReplayEngine, **options: str) -> Iterator[Plugin]:
    made = Plugin(default_endpoint(int(engine.base_url.rpartition(":")[2])), **options)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.sglang("chat_stream", "chat_stream_usage")
    scripts["endless"] = scenarios.endless(load("chat_stream"))
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "id": "e"}) as gateway:
        yield gateway


def the_engine(gateway: RunningGateway) -> Engine:
    return next(iter(gateway.app.registry))


async def linked(gateway: RunningGateway) -> None:
    await eventually(lambda: the_engine(gateway).stats is not None and the_engine(gateway).linked, "linked")


def asks(model: str) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]}


async def test_a_linked_engine_is_shown_with_its_load(gateway: RunningGateway, engine: ReplayEngine) -> None:
    with plugin(engine):
        await linked(gateway)
        (shown,) = (await gateway.client.get("/admin/engines")).json()["engines"]
        assert shown["linked"] is True
        assert shown["reason"] is None
        assert (shown["running"], shown["waiting"], shown["parked"]) == (3, 2, 0)
        assert (shown["kv_used_tokens"], shown["kv_tokens"], shown["tokens_per_s"]) == (400, 1000, 12.3)
        assert shown["ranks_lost"] is False
        metrics = (await gateway.client.get("/metrics")).text
        assert 'tokenflow_engine_linked{engine="e"} 1.0' in metrics
        assert 'tokenflow_engine_ranks_lost{engine="e"} 0.0' in metrics
        assert 'tokenflow_engine_running{engine="e"} 3.0' in metrics
        assert 'tokenflow_engine_link_dropped{engine="e"} 0.0' in metrics


async def test_ranks_that_have_ceased_to_agree_are_shown(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    with plugin(engine) as it:
        it.tell(ranks_lost=1)
        await eventually(lambda: getattr(the_engine(gateway).stats, "ranks_lost", 0) == 1, "it is told")
        (shown,) = (await gateway.client.get("/admin/engines")).json()["engines"]
        assert shown["ranks_lost"] is True
        metrics = (await gateway.client.get("/metrics")).text
        assert 'tokenflow_engine_ranks_lost{engine="e"} 1.0' in metrics


async def test_an_unlinked_engine_shows_nulls_and_a_reason_and_serves(gateway: RunningGateway) -> None:
    await eventually(
        lambda: "no plugin answers" in str(the_engine(gateway).link_reason), "silence is noticed"
    )
    (shown,) = (await gateway.client.get("/admin/engines")).json()["engines"]
    assert (shown["linked"], shown["running"], shown["kv_tokens"]) == (False, None, None)
    assert "no plugin answers at ipc://" in shown["reason"]
    metrics = (await gateway.client.get("/metrics")).text
    assert 'tokenflow_engine_linked{engine="e"} 0.0' in metrics
    assert "tokenflow_engine_running{" not in metrics
    assert (await gateway.client.post(CHAT, json=asks("chat_stream"))).content.endswith(b"data: [DONE]\n\n")


async def test_a_stream_is_announced_followed_and_closed(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    hold = asyncio.Event()
    engine.scripts["held"] = scenarios.replay(load("chat_stream_usage"), gates={2: hold})
    with plugin(engine) as scheduler:
        await linked(gateway)
        request = asyncio.create_task(gateway.client.post(CHAT, json=asks("held")))
        await eventually(lambda: bool(scheduler.opened()), "the stream is announced")
        (rid,) = scheduler.opened()
        scheduler.report(rid, "running", 5)
        await eventually(lambda: gateway.streams[0].counted == 5, "the count has come")
        listed = (await gateway.client.get("/admin/streams")).json()
        assert listed["total"] == 1
        (shown,) = listed["streams"]
        assert (shown["id"], shown["state"], shown["generated"], shown["engine"]) == (rid, "running", 5, "e")
        hold.set()
        await request
        await eventually(lambda: scheduler.closed() == {rid: "finished"}, "the stream is closed")
        scheduler.confirm(rid, generated=gateway.streams[0].usage_tokens or 0, was_live=False)
        await gateway.everything_released()
    assert gateway.metric("tokenflow_count_mismatches_total", engine="e") == 0


async def test_a_count_that_differs_from_the_usage_is_noticed(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """The control of the comparison above."""
    with plugin(engine) as scheduler:
        await linked(gateway)
        await gateway.client.post(CHAT, json=asks("chat_stream_usage"))
        await eventually(lambda: bool(scheduler.closed()), "closed")
        scheduler.confirm(scheduler.opened()[0], generated=10_000, was_live=False)
        await gateway.everything_released()
    assert gateway.metric("tokenflow_count_mismatches_total", engine="e") == 1


async def test_a_client_that_leaves_is_reported_at_once_and_kept_until_confirmed(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    with plugin(engine) as scheduler:
        await linked(gateway)
        async with gateway.client.stream("POST", CHAT, json=asks("endless")) as answer:
            await anext(answer.aiter_raw())
        await eventually(lambda: bool(scheduler.closed()), "the engine is told", timeout_s=1)
        ((rid, reason),) = scheduler.closed().items()
        assert reason == "client_gone"
        assert [(stream.rid, stream.state) for stream in gateway.streams] == [(rid, "closing")]
        scheduler.confirm(rid, generated=7)
        await gateway.everything_released()
    assert gateway.metric("tokenflow_aborts_total", outcome="confirmed") == 1


async def test_an_abort_that_nobody_confirms_is_given_up_on_and_counted(
    gateway: RunningGateway, engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "CONFIRM_WITHIN_S", 0.1)
    with plugin(engine):
        await linked(gateway)
        async with gateway.client.stream("POST", CHAT, json=asks("endless")) as answer:
            await anext(answer.aiter_raw())
        await gateway.everything_released()
    assert gateway.metric("tokenflow_aborts_total", outcome="unconfirmed") == 1


async def test_a_restarted_engine_is_found_again_and_hears_of_live_streams(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    hold = asyncio.Event()
    engine.scripts["held"] = scenarios.replay(load("chat_stream"), gates={2: hold})
    with plugin(engine) as scheduler:
        await linked(gateway)
        request = asyncio.create_task(gateway.client.post(CHAT, json=asks("held")))
        await eventually(lambda: bool(scheduler.opened()), "announced")
        (rid,) = scheduler.opened()
    with plugin(engine, engine_id="e-2") as scheduler:
        await eventually(lambda: scheduler.opened() == [rid], "announced anew")
        welcome = the_engine(gateway).welcome
        assert welcome is not None
        assert welcome.engine_id == "e-2"
        hold.set()
        assert (await request).content.endswith(b"data: [DONE]\n\n")


async def test_streams_go_on_without_the_link(gateway: RunningGateway, engine: ReplayEngine) -> None:
    hold = asyncio.Event()
    engine.scripts["held"] = scenarios.replay(load("chat_stream"), gates={2: hold})
    with plugin(engine):
        await linked(gateway)
        request = asyncio.create_task(gateway.client.post(CHAT, json=asks("held")))
        await eventually(lambda: len(engine.requests) > 0 and bool(gateway.streams), "the stream runs")
    await eventually(lambda: not the_engine(gateway).linked, "the lost link is noticed")
    assert the_engine(gateway).link_reason == "the plugin has gone silent"
    hold.set()
    whole = await gateway.client.post(CHAT, json=asks("chat_stream"))
    assert (await request).content == whole.content
    assert whole.content.endswith(b"data: [DONE]\n\n")
    await gateway.everything_released()


async def test_a_new_gateway_process_replaces_the_old_one(engine: ReplayEngine) -> None:
    with plugin(engine) as scheduler:
        for _ in range(2):
            async with running_gateway({"url": engine.base_url, "id": "e"}) as gateway:
                await linked(gateway)
        await eventually(
            lambda: any(isinstance(d.message, Replaced) for d in scheduler.listen()),
            "replaced",
        )


async def test_a_wrong_secret_is_refused_in_words(
    engine: ReplayEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with plugin(engine, secret="the engine's"):
        async with running_gateway({"url": engine.base_url, "id": "e"}, link_secret="another") as gateway:
            await eventually(lambda: "refused" in str(the_engine(gateway).link_reason), "the refusal")
            assert "TOKENFLOW_LINK_SECRET" in str(the_engine(gateway).link_reason)
            assert not the_engine(gateway).linked
    assert "refused gateway" in caplog.text
    assert "another" not in caplog.text


async def test_another_version_is_refused_in_words(engine: ReplayEngine) -> None:
    """An engine of a later release: its welcome has a version that this gateway does not know."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(default_endpoint(int(engine.base_url.rpartition(":")[2])))
    later = Welcome(**{**_fields(WELCOME), "version": PROTOCOL_VERSION + 1})
    try:
        async with running_gateway({"url": engine.base_url, "id": "e"}) as gateway:
            identity, _hello = await socket.recv_multipart()
            await socket.send_multipart([identity, encode([later])])
            await eventually(
                lambda: f"protocol {later.version}" in str(the_engine(gateway).link_reason), "the refusal"
            )
            assert not the_engine(gateway).linked
    finally:
        context.destroy(linger=0)


async def test_bytes_that_are_no_message_cost_the_link_and_nothing_else(engine: ReplayEngine) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(default_endpoint(int(engine.base_url.rpartition(":")[2])))
    try:
        async with running_gateway({"url": engine.base_url, "id": "e"}) as gateway:
            identity, _hello = await socket.recv_multipart()
            await socket.send_multipart([identity, b"\xff\xff"])
            await eventually(lambda: "link failed" in str(the_engine(gateway).link_reason), "the failure")
            answer = await gateway.client.post(CHAT, json=asks("chat_stream"))
            assert answer.content.endswith(b"data: [DONE]\n\n")
    finally:
        context.destroy(linger=0)


async def test_a_message_that_cannot_be_sent_costs_the_link_once(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    with plugin(engine) as scheduler:
        await linked(gateway)
        the_engine(gateway).tell(SetPolicy(policy="\ud800"))
        await eventually(lambda: "link failed" in str(the_engine(gateway).link_reason), "the failure")
        await eventually(lambda: the_engine(gateway).linked, "linked again")
        answer = await gateway.client.post(CHAT, json=asks("chat_stream"))
        assert answer.content.endswith(b"data: [DONE]\n\n")
        await eventually(lambda: bool(scheduler.opened()), "the engine hears of streams")


async def test_an_encrypted_link_works_and_needs_the_secret(engine: ReplayEngine) -> None:
    """Over tcp both ends use CURVE."""
    made = Plugin("tcp://0.0.0.0:0")
    port = made._server.endpoint.rpartition(":")[2]
    try:
        entry = {"url": engine.base_url, "id": "e", "link": f"tcp://0.0.0.0:{port}"}
        async with running_gateway(entry) as gateway:
            await linked(gateway)
        async with running_gateway(entry, link_secret="wrong") as gateway:
            begun = time.monotonic()
            await eventually(
                lambda: "no plugin answers" in str(the_engine(gateway).link_reason), "not let in"
            )
            assert time.monotonic() - begun < 10
    finally:
        made.close()


async def test_the_engine_hears_of_a_readers_pause_and_of_nothing_it_knows(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    hold = asyncio.Event()
    transcript = load("chat_stream_length")
    engine.scripts["held"] = scenarios.replay(transcript, gates={len(transcript.reads) - 1: hold})
    with plugin(engine) as scheduler:
        await linked(gateway)
        headers = {"x-tokenflow-rate": "0.25", "x-tokenflow-reader": "voice"}
        async with gateway.client.stream("POST", CHAT, json=asks("held"), headers=headers) as answer:
            rid, _, capability = answer.headers["x-tokenflow-stream"].partition(".")
            await eventually(lambda: bool(scheduler.opened()), "announced")
            (opened,) = [d.message for d in scheduler.heard if isinstance(d.message, StreamOpened)]
            assert (opened.reader, opened.declared_rate) == ("voice", 0.25)
            scheduler.report(rid, "running", 20)
            await eventually(lambda: gateway.streams[0].counted == 20, "the count has come")
            assert gateway.app._relay is not None
            feed = gateway.app._relay.generations.lifecycle.feed
            feed.changed(gateway.streams[0])
            feed.flush()
            assert scheduler.readings(rid) == [], "it reads as declared: nothing to say"
            body = {"capability": capability, "reports": [{"seq": 0, "tokens": 5, "paused": True}]}
            await gateway.client.post(f"/v1/streams/{rid}/progress", json=body)
            await eventually(lambda: bool(scheduler.readings(rid)), "the pause has come", timeout_s=0.5)
            (reading,) = scheduler.readings(rid)
            assert (reading.paused, reading.consumed) == (True, 5.0)
            hold.set()
