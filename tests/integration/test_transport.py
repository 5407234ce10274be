"""What connections show of readers, over real sockets: clients whose true position is known.

The pauses noticed within half a second here are those of clients that keep up. Between two steps of the
window (see `readers.window`) a client that is behind looks like one that has paused.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.paced_client import PacedClient, events, paced_client
from support.replay_engine import ReplayEngine
from tokenflow_gateway.readers.connection import ConnectionTrack
from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.stream import Stream

SMALL = 4096


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.recordings("models")
    scripts["/v1/models"] = scripts["models"]
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        yield gateway
        await gateway.everything_released()


@dataclass
class Watched:
    """A stream and its client, compared twenty times a second."""

    client: PacedClient
    stream: Stream
    errors: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)

    @property
    def state(self) -> str:
        return self.stream.reader.estimate(time.monotonic()).state

    async def for_s(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            self.compare()
            await asyncio.sleep(0.05)

    def compare(self) -> None:
        estimate = self.stream.reader.estimate(time.monotonic())
        self.errors.append(estimate.consumed - self.client.position)
        self.states.append(estimate.state)
        self.sources.add(estimate.source)
        connection, reader = self.stream.connection, self.stream.reader
        assert connection is not None
        unread_at_the_look = reader.handed_over - self.client.position + 3
        assert connection.unread_at_least <= unread_at_the_look, "looks are a tenth of a second old"

    async def notices_pause(self) -> float:
        """Seconds from now until the estimate says that the reader has paused."""
        begun = time.monotonic()
        await eventually(lambda: self.state == "paused", "paused")
        return time.monotonic() - begun

    @property
    def mean_error(self) -> float:
        return statistics.fmean(abs(error) for error in self.errors)


def the_stream(gateway: RunningGateway, model: str) -> Stream:
    (stream,) = [stream for stream in gateway.streams if stream.model == model]
    return stream


async def test_a_small_buffer_shows_the_position_the_pace_and_pauses(
    gateway: RunningGateway, engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 events a second of 50, a pause of 4 s, and a client that has said 30. Its twin is not looked at."""
    blind: list[ReaderTrack] = []
    look = ConnectionTrack.look

    def look_but_at_the_twin(track: ConnectionTrack, reader: ReaderTrack, *, now: float) -> bool:
        return reader not in blind and look(track, reader, now=now)

    monkeypatch.setattr(ConnectionTrack, "look", look_but_at_the_twin)
    engine.scripts["seen"] = events(2000, per_s=50)
    engine.scripts["twin"] = events(2000, per_s=50)
    settings = {"per_s": 10.0, "receive_buffer": SMALL, "headers": "x-tokenflow-rate: 30\r\n"}
    url = gateway.base_url
    async with (
        paced_client(url, model="seen", **settings) as client,  # type: ignore[arg-type]
        paced_client(url, model="twin", **settings) as twin_client,  # type: ignore[arg-type]
    ):
        seen = Watched(client, the_stream(gateway, "seen"))
        twin = Watched(twin_client, the_stream(gateway, "twin"))
        blind.append(twin.stream.reader)

        async def both_for_s(seconds: float) -> None:
            await asyncio.gather(seen.for_s(seconds), twin.for_s(seconds))

        await both_for_s(7)
        assert seen.sources >= {"transport"}
        assert seen.states[40:].count("paused") < 0.2 * len(seen.states[40:]), "reading in steps is no pause"
        assert seen.stream.reader.estimate(time.monotonic()).rate == pytest.approx(10, rel=0.5)
        client.paused = twin_client.paused = True
        await both_for_s(4)
        assert seen.state == "paused"
        client.paused = twin_client.paused = False
        await both_for_s(3.5)
        assert seen.state == "reading"
        assert twin.state != "paused"
    assert seen.mean_error <= 20
    assert twin.mean_error > 3 * seen.mean_error


async def test_a_client_that_keeps_up_is_known_to_pause_at_once(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """It reads ahead of its reader, who is still taken to read at the average pace."""
    engine.scripts["m"] = events(2000, per_s=50)
    async with paced_client(gateway.base_url, model="m", per_s=None, receive_buffer=SMALL) as client:
        watched = Watched(client, the_stream(gateway, "m"))
        await watched.for_s(2.5)
        assert watched.sources == {"model"}
        assert "paused" not in watched.states
        client.paused = True
        assert await watched.notices_pause() < 0.8
        await watched.for_s(1)
        assert set(watched.states[-15:]) == {"paused"}
        connection = watched.stream.connection
        assert connection is not None
        assert connection.unread_at_least > 5
        client.paused = False
        await eventually(lambda: watched.state == "reading", "reading again")
        assert watched.stream.reader.estimate(time.monotonic()).source == "model"


async def test_default_buffers_show_a_pause_once_the_window_closes(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["m"] = events(4000, per_s=400)
    async with paced_client(gateway.base_url, model="m", per_s=None) as client:
        watched = Watched(client, the_stream(gateway, "m"))
        await watched.for_s(1.5)
        assert "paused" not in watched.states
        client.paused = True
        await watched.notices_pause()
        connection, reader = watched.stream.connection, watched.stream.reader
        assert connection is not None
        await eventually(lambda: watched.stream.held_bytes > 0, "what the client does not take waits here")
        await watched.for_s(0.5)
        unread = reader.handed_over - client.position
        assert 0.2 * unread < connection.unread_at_least <= unread


@pytest.mark.parametrize("receive_buffer", [SMALL, 0])
async def test_a_pause_is_noticed_when_events_come_in_bursts(
    gateway: RunningGateway, engine: ReplayEngine, receive_buffer: int
) -> None:
    """20 events at once, 200 a second, to a client that keeps up and then takes nothing more."""
    engine.scripts["m"] = events(4000, per_s=200, at_once=20)
    async with paced_client(gateway.base_url, model="m", per_s=None, receive_buffer=receive_buffer) as client:
        watched = Watched(client, the_stream(gateway, "m"))
        await watched.for_s(2.5)
        assert "paused" not in watched.states
        client.paused = True
        assert await watched.notices_pause() < (1.0 if receive_buffer else 4.0)


async def test_a_client_that_never_reads_is_noticed_once_its_window_is_shut(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["m"] = events(8000, per_s=4000, at_once=40)
    async with paced_client(gateway.base_url, model="m", per_s=None) as client:
        client.paused = True
        stream = the_stream(gateway, "m")
        await eventually(lambda: stream.held_bytes > 0, "what the client does not take waits here")
        assert await Watched(client, stream).notices_pause() < 1.5


async def test_the_view_says_whose_connection_it_is(gateway: RunningGateway, engine: ReplayEngine) -> None:
    engine.scripts["m"] = events(2000, per_s=50)
    for header, kind in [("", "direct"), ("x-forwarded-for: 192.0.2.1\r\n", "proxied")]:
        async with paced_client(gateway.base_url, model="m", per_s=None, headers=header) as client:
            await eventually(lambda client=client: client.position > 2, "text")
            assert the_stream(gateway, "m").view(time.monotonic())["connection"] == kind
        await gateway.everything_released()


async def test_a_machine_has_consumed_what_it_has_taken(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["m"] = events(2000, per_s=100)
    machine = "x-tokenflow-reader: machine\r\n"
    async with paced_client(
        gateway.base_url, model="m", per_s=10, receive_buffer=SMALL, headers=machine
    ) as client:
        watched = Watched(client, the_stream(gateway, "m"))
        await eventually(lambda: watched.stream.received - client.position > 200, "much waits for it")
        await watched.for_s(3)
        assert watched.mean_error <= 30


async def test_without_a_meter_all_is_as_if_there_were_no_connection(
    engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow_gateway.http_protocol.SocketMeter.of", lambda transport: None)
    engine.scripts["m"] = events(2000, per_s=50)
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        async with paced_client(gateway.base_url, model="m", per_s=None) as client:
            await eventually(lambda: client.position > 10, "text")
            stream = the_stream(gateway, "m")
            assert stream.connection is None
            view = stream.view(time.monotonic())
            assert (view["unread_at_least"], view["connection"]) == (None, "unseen")
        await gateway.everything_released()


async def test_a_connection_that_is_kept_is_looked_at_again(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """The second answer on it is measured from where the first one ended."""
    for number, model in enumerate(("one", "two")):
        engine.scripts[model] = events(60, per_s=100)
        body = {"model": model, "stream": True, "messages": []}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            stream = the_stream(gateway, model)
            async for _ in answer.aiter_raw():
                view = stream.view(time.monotonic())
                assert view["source"] == "model"
                assert view["unread_at_least"] == 0
        assert len({seen.connection for seen in engine.requests if seen.method == "POST"}) <= number + 1
