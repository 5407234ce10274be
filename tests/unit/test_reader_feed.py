"""When the feed looks at readers, and what the engine is told."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.gateway import eventually
from tokenflow_engine.buffer import VirtualBuffer
from tokenflow_engine.protocol import Consumption, Welcome
from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.link.feed import ReaderFeed
from tokenflow_gateway.readers.estimator import Source
from tokenflow_gateway.readers.progress import ProgressReport
from tokenflow_gateway.readers.registry import ReaderRegistry
from tokenflow_gateway.readers.rounds import AT_A_TIME
from tokenflow_gateway.readers.tally import Look
from tokenflow_gateway.relay.stream import Stream

PATIENCE_S = 10.0

_numbers = itertools.count()


def readers() -> ReaderRegistry:
    return ReaderRegistry(learned=None, count=lambda source, look: None)


def stream_on(engine: Engine) -> Stream:
    now = time.monotonic()
    track = readers().opened(tenant="t", user=None, reader="human", declared_rate=None, now=now)
    buffer = VirtualBuffer(rate=5.0, now=time.monotonic())
    rid = f"tf-{next(_numbers)}"
    return Stream(
        rid=rid, request_id="r", route="/", model="m", engine=engine, reader=track, engine_copy=buffer
    )


@asynccontextmanager
async def running(feed: ReaderFeed) -> AsyncIterator[None]:
    task = asyncio.create_task(feed.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_reports_on_one_stream_keep_no_other_from_being_looked_at() -> None:
    engine = Engine(EngineConfig(url="http://127.0.0.1:1"))
    busy, quiet = stream_on(engine), stream_on(engine)
    feed = ReaderFeed([busy, quiet], readers(), lambda engine, message: True)
    async with running(feed), asyncio.timeout(PATIENCE_S):
        while quiet.reader.tally.at <= quiet.started + 0.1:
            feed.changed(busy)
            await asyncio.sleep(0.005)


async def test_many_readers_are_all_looked_at_in_turns() -> None:
    engine = Engine(EngineConfig(url="http://127.0.0.1:1"))
    streams = [stream_on(engine) for _ in range(1200)]
    feed = ReaderFeed(streams, readers(), lambda engine, message: True)
    async with running(feed):
        await eventually(
            lambda: all(stream.reader.tally.at > stream.started + 0.1 for stream in streams), "all looked at"
        )


async def test_no_turn_of_the_event_loop_has_more_than_a_few_of_many_looks() -> None:
    engine = Engine(EngineConfig(url="http://127.0.0.1:1"))
    looks, most = [0], 0

    def next_turn() -> None:
        nonlocal most, ticking
        most = max(most, looks[0])
        looks[0] = 0
        ticking = loop.call_soon(next_turn)

    def count(source: Source, look: Look) -> None:
        looks[0] += 1

    streams = [stream_on(engine) for _ in range(300)]
    feed = ReaderFeed(streams, ReaderRegistry(learned=None, count=count), lambda engine, message: True)
    feed.reset(streams)
    loop = asyncio.get_running_loop()
    ticking = loop.call_soon(next_turn)
    async with running(feed):
        await eventually(
            lambda: all(stream.reader.tally.at > stream.started + 0.1 for stream in streams), "all looked at"
        )
    ticking.cancel()
    assert 0 < most <= 2 * AT_A_TIME, "those that have changed, and those whose time has come"


async def test_readers_are_looked_at_without_a_link_and_nothing_is_sent() -> None:
    stream = stream_on(Engine(EngineConfig(url="http://127.0.0.1:1")))
    sent: list[Consumption] = []
    feed = ReaderFeed([stream], readers(), lambda engine, message: sent.append(message) is None)
    feed.changed(stream)
    feed.flush()
    assert stream.reader.tally.state is None, "looked at: nothing has come yet, and that is no stall"
    assert stream.reader.tally.at > stream.started
    assert not sent


# ---- what the engine is told ---------------------------------------------------------------------


def linked() -> Engine:
    engine = Engine(EngineConfig(url="http://127.0.0.1:1"))
    engine.welcome = Welcome(
        version=1, engine_id="e", model="m", engine="x", capabilities=[], kv_tokens=1, max_running=1
    )
    return engine


class Link:
    """Drops messages or holds them back until later ones have come; the engine's buffer is behind it.

    The feed's clocks stand still, so that both sides can be compared; its wall clock is wrong by `set_by_s`.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        self.set_by_s = 0.0
        self.takes = True
        self.delays = False
        self.sent = 0
        self._late: list[Consumption] = []
        clocks = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now + self.set_by_s)
        patch.setattr("tokenflow_gateway.link.feed.time", clocks)
        self.stream = stream_on(linked())
        self.stream.engine_copy = VirtualBuffer(rate=5.0, now=self.now)
        self.buffer = VirtualBuffer(rate=5.0, now=self.now)
        self.feed = ReaderFeed([self.stream], readers(), self.send)
        for _ in range(500):
            self.stream.reader.content("word ")
        self.stream.reader.delivered([500], [self.now])
        self.stream.counted = 500
        self.buffer.generate(500, now=self.now)

    def report(self, position: float, *, paused: bool, seq: int) -> None:
        self.stream.reader.progress([ProgressReport(seq=seq, tokens=position, paused=paused)], self.now)

    def send(self, engine: Engine, message: Consumption) -> bool:
        if not self.takes:
            return False
        self.sent += 1
        if self.delays:
            self._late.append(message)
            return True
        for one in [message, *self._late]:  # what was delayed has been overtaken
            for reading in one.readings:
                self.buffer.report(reading, now=self.now)
        self._late.clear()
        return True

    def look(self) -> None:
        self.feed.changed(self.stream)
        self.feed.flush()

    def check_that_both_sides_agree(self) -> None:
        copy = self.stream.engine_copy
        assert self.buffer.paused == copy.paused
        for later_s in (0.0, 1.0, 10.0):
            at = self.now + later_s
            assert self.buffer.consumed_at(at) == pytest.approx(copy.consumed_at(at))


def test_what_the_link_did_not_take_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch)
    link.takes = False
    link.report(10.0, paused=True, seq=1)
    link.look()
    assert not link.buffer.paused
    link.takes = True
    link.look()
    assert (link.buffer.paused, link.buffer.consumed_at(link.now + 9)) == (True, 10.0)
    link.look()
    assert link.sent == 1, "and once only"


def test_after_a_reset_the_engine_hears_of_every_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even of one who is just where a new buffer begins: the engine's may have gone on."""
    link = Link(monkeypatch)
    link.look()
    before = link.sent
    link.feed.reset([link.stream])
    link.takes = False
    link.look()
    link.takes = True
    link.look()
    link.look()
    assert link.sent == before + 1


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3),
            st.floats(0, 400),
            st.booleans(),
            st.sampled_from(["taken", "dropped", "delayed"]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_both_sides_agree_whatever_was_lost_even_the_last_report(
    story: list[tuple[float, float, bool, str]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        link = Link(patch)
        for seq, (wait_s, position, paused, fate) in enumerate(story):
            link.now += wait_s
            link.takes, link.delays = fate != "dropped", fate == "delayed"
            link.report(position, paused=paused, seq=seq)
            link.look()
        link.takes, link.delays = False, False
        link.report(450.0, paused=not story[-1][2], seq=len(story))  # such as nobody foresees
        link.look()
        link.takes = True
        link.look()
        assert link.stream.engine_copy.consumed_at(link.now) == pytest.approx(450.0)
        link.check_that_both_sides_agree()


def test_a_clock_that_is_set_stops_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch)
    for seq, set_by_s in enumerate([0.0, -3600.0, 0.0, 3600.0]):
        link.set_by_s = set_by_s
        link.report(50.0 + 10 * seq, paused=seq % 2 > 0, seq=seq)
        link.look()
        assert link.buffer.consumed_at(link.now) == 50.0 + 10 * seq
        link.check_that_both_sides_agree()
