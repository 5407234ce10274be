"""When the feed looks at readers, and what the engine is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from support.gateway import eventually
from tokenflow_engine.buffer import VirtualBuffer
from tokenflow_engine.protocol import Consumption
from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.link.feed import ReaderFeed
from tokenflow_gateway.readers.registry import ReaderRegistry
from tokenflow_gateway.relay.stream import Stream, new_rid

PATIENCE_S = 10.0


def readers() -> ReaderRegistry:
    return ReaderRegistry(learned=None, count=lambda source, look: None)


def stream_on(engine: Engine) -> Stream:
    now = time.monotonic()
    track = readers().opened(tenant="t", user=None, reader="human", declared_rate=None, now=now)
    buffer = VirtualBuffer(rate=5.0, now=time.time())
    return Stream(
        rid=new_rid(), request_id="r", route="/", model="m", engine=engine, reader=track, engine_copy=buffer
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


async def test_readers_are_looked_at_without_a_link_and_nothing_is_sent() -> None:
    stream = stream_on(Engine(EngineConfig(url="http://127.0.0.1:1")))
    sent: list[Consumption] = []
    feed = ReaderFeed([stream], readers(), lambda engine, message: sent.append(message) is None)
    feed.changed(stream)
    feed.flush()
    assert stream.reader.tally.state is None, "looked at: nothing has come yet, and that is no stall"
    assert stream.reader.tally.at > stream.started
    assert not sent
