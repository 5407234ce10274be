"""The replayed engine: sends what was recorded and nothing else, breaks as told, sees its clients leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest
import uvloop

from support.replay_engine import Hold, ReplayEngine, Script, Send
from support.scenarios import (
    closes_mid_event,
    crlf,
    endless,
    ends_without_done,
    error_500,
    faults,
    flat_error,
    never_answers,
    never_begins,
    pings_only,
    raw,
    recordings,
    replay,
    resets,
    slow_first_byte,
    split_at,
)
from support.transcripts import Transcript, load, names, streams

pytestmark = pytest.mark.timeout(20)
STREAM = load("chat_stream")
CHAT = "/v1/chat/completions"


class Wire:
    """A client that shows every chunk of the transfer as it is framed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    def ask(
        self, model: str, *, method: str = "POST", path: str = "/v1/chat/completions", more: str = ""
    ) -> None:
        body = json.dumps({"model": model}) if model else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        self.writer.write((head + body).encode())

    async def head(self) -> None:
        first, *rest = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()[:-1]
        self.status = int(first.split()[1])
        self.headers = dict(line.lower().split(": ", 1) for line in rest)

    async def chunk(self) -> bytes:
        """One chunk; empty for the end. Raises what the connection's end raises."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def chunks(self) -> AsyncIterator[bytes]:
        while data := await self.chunk():
            yield data

    async def body(self) -> bytes:
        if size := self.headers.get("content-length"):
            return await self.reader.readexactly(int(size))
        return b"".join([data async for data in self.chunks()])


@asynccontextmanager
async def wire(engine: ReplayEngine) -> AsyncIterator[Wire]:
    host, port = engine.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def asked(script: Script) -> AsyncIterator[tuple[ReplayEngine, Wire]]:
    """A client that has just sent its request for this script."""
    async with ReplayEngine({"m": script}) as engine, wire(engine) as client:
        client.ask("m")
        yield engine, client


@pytest.mark.parametrize("transcript", streams(), ids=lambda transcript: transcript.name)
async def test_a_stream_is_replayed_part_by_part(transcript: Transcript) -> None:
    """The same bytes in the same chunks, with the headers that say how to read them."""
    async with asked(replay(transcript)) as (_, client):
        await client.head()
        assert (client.status, client.headers) == (transcript.status, transcript.headers)
        assert [data async for data in client.chunks()] == [read.data for read in transcript.reads]


@pytest.mark.parametrize("name", [name for name in names() if not load(name).is_stream])
async def test_a_plain_answer_is_replayed(name: str) -> None:
    """Errors and other whole bodies keep their status and length."""
    transcript = load(name)
    async with asked(replay(transcript)) as (_, client):
        await client.head()
        assert client.status == transcript.status
        assert await client.body() == transcript.data


async def test_recorded_delays_are_kept_and_scaled() -> None:
    """`speed` divides the recorded times; without one there are none."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    scripts = {"double": replay(STREAM, speed=2.0), "at once": replay(STREAM)}
    async with ReplayEngine(scripts, sleep=sleep) as engine, wire(engine) as client:
        client.ask("double")
        await client.head()
        await client.body()
        assert slept == [pytest.approx(read.delta_ms / 2000) for read in STREAM.reads]
        slept.clear()
        client.ask("at once")
        await client.head()
        await client.body()
        assert slept == []


async def test_a_gate_holds_the_stream_where_the_test_wants_it() -> None:
    """What comes before the gate arrives; what comes after waits for it."""
    gate = asyncio.Event()
    async with asked(replay(STREAM, gates={3: gate})) as (engine, client):
        await client.head()
        assert [await client.chunk() for _ in range(3)] == [read.data for read in STREAM.reads[:3]]
        seen = await engine.request(0)
        assert seen.sent_bytes == sum(len(read.data) for read in STREAM.reads[:3])
        gate.set()
        assert await client.body() == b"".join(read.data for read in STREAM.reads[3:])
        await seen.done.wait()
        assert not seen.disconnected.is_set()


async def test_requests_are_seen_as_they_were_sent() -> None:
    """Method, path without query, headers in lower case, body, and which connection brought it."""
    async with ReplayEngine(recordings("chat_stream", "models")) as engine, wire(engine) as client:
        client.ask("chat_stream", path="/v1/chat/completions?a=1", more="X-Thing: Yes\r\n")
        await client.head()
        await client.body()
        client.ask("", method="GET", path="/v1/models", more="X-Replay: models\r\n")
        await client.head()
        assert await client.body() == load("models").data
        first, second = engine.requests
        assert (first.method, first.path, first.headers["x-thing"]) == ("POST", "/v1/chat/completions", "Yes")
        assert first.json() == {"model": "chat_stream"}
        assert (second.method, second.path, second.body) == ("GET", "/v1/models", b"")
        assert first.connection == second.connection


async def test_an_unknown_script_is_said_so() -> None:
    """A typing error in a test is a 404 that names what there is."""
    async with ReplayEngine(recordings("chat_stream")) as engine, wire(engine) as client:
        client.ask("chat_steam")
        await client.head()
        assert client.status == 404
        assert b"'chat_steam'" in (text := await client.body())
        assert b"chat_stream" in text


@pytest.mark.parametrize(
    "script",
    [never_answers, never_begins, lambda: endless(STREAM), lambda: Script(steps=[Hold(asyncio.Event())])],
    ids=["never-answers", "never-begins", "endless", "held"],
)
async def test_a_client_that_leaves_is_noticed(script: Callable[[], Script]) -> None:
    """Whatever the engine is doing: silent, waiting for a gate or sending without end."""
    async with asked(script()) as (engine, client):
        seen = await engine.request(0)
        assert not seen.disconnected.is_set()
        client.writer.close()
        await seen.disconnected.wait()
        await seen.done.wait()
        assert engine.open_connections == 0


async def test_a_client_that_stays_is_not_taken_for_one_that_left() -> None:
    """Also when it closes its connection after the whole answer."""
    async with asked(replay(STREAM)) as (engine, client):
        await client.head()
        await client.body()
        client.writer.close()
        await client.writer.wait_closed()
        await engine.requests[0].done.wait()
        assert not engine.requests[0].disconnected.is_set()


async def test_a_client_that_stops_reading_stops_the_engine() -> None:
    """What an endless stream has sent is bounded by the sockets' buffers, and goes on when it is read."""
    async with asked(endless(STREAM)) as (engine, client):
        seen = await engine.request(0)
        client.writer.transport.pause_reading()
        before = -1
        while before != seen.sent_bytes:
            before = seen.sent_bytes
            await asyncio.sleep(0.2)  # a stall is the absence of progress: it takes a time to say so
        assert before > 0
        client.writer.transport.resume_reading()
        await client.head()
        while seen.sent_bytes == before:
            await client.chunk()


async def test_an_early_end_without_done_is_a_proper_end() -> None:
    """Only the content is missing: the framing is complete."""
    async with asked(ends_without_done(STREAM, after_reads=4)) as (_, client):
        await client.head()
        assert await client.body() == b"".join(read.data for read in STREAM.reads[:4])


async def test_a_connection_closed_mid_event_has_no_proper_end() -> None:
    """The client sees the end of the connection in the place of the next chunk."""
    async with asked(closes_mid_event(STREAM, after_bytes=100)) as (engine, client):
        await client.head()
        assert await client.chunk() == STREAM.data[:100]
        with pytest.raises(asyncio.IncompleteReadError):
            await client.chunk()
        assert not engine.requests[0].disconnected.is_set()


async def test_a_reset_is_a_reset() -> None:
    """Not a FIN: the client's read fails."""
    gate = asyncio.Event()
    async with asked(resets(STREAM, after_reads=2, gate=gate)) as (_, client):
        await client.head()
        assert [await client.chunk(), await client.chunk()] == [read.data for read in STREAM.reads[:2]]
        gate.set()
        with pytest.raises(ConnectionResetError):
            await client.chunk()


async def test_a_slow_first_byte_holds_back_the_headers_too() -> None:
    """As SGLang does it, which answers when it has something to say."""
    gate = asyncio.Event()
    async with asked(slow_first_byte(STREAM, gate)) as (engine, client):
        await engine.request(0)
        head = asyncio.create_task(client.head())
        await asyncio.wait([head], timeout=0.05)
        assert not head.done()
        gate.set()
        await head
        assert await client.body() == STREAM.data


async def test_headers_may_come_long_before_the_body() -> None:
    """Unlike SGLang, but like others."""
    async with asked(never_begins()) as (_, client):
        await client.head()
        assert client.status == 200


async def test_errors_are_flat_as_the_engine_sends_them() -> None:
    """Before the stream with a status, in it as an event."""
    async with asked(error_500()) as (_, client):
        await client.head()
        assert client.status == 500
        error = await client.body()
        assert json.loads(error)["object"] == "error"
    async with asked(flat_error(STREAM, after_reads=3)) as (_, client):
        await client.head()
        *before, last = [data async for data in client.chunks()]
        assert before == [read.data for read in STREAM.reads[:3]]
        assert last == b"data: " + error + b"\n\n"


async def test_other_cuts_and_line_ends() -> None:
    """The same body, cut elsewhere or with other line ends."""
    async with asked(split_at(STREAM, [1, 2, 500])) as (_, client):
        await client.head()
        chunks = [data async for data in client.chunks()]
        assert [len(data) for data in chunks[:3]] == [1, 1, 498]
        assert b"".join(chunks) == STREAM.data
    async with asked(crlf(STREAM)) as (_, client):
        await client.head()
        assert await client.body() == STREAM.data.replace(b"\n", b"\r\n")


async def test_pings_only() -> None:
    """Comments without end, from the first one for every request."""
    async with asked(pings_only(interval_s=0.001)) as (_, client):
        await client.head()
        assert {await client.chunk() for _ in range(5)} == {b": ping\n\n"}


async def test_every_fault_can_be_asked_for_by_name() -> None:
    """Each name leads to an answer, a broken connection or silence; none is misspelt or breaks the server."""
    async with ReplayEngine({**faults(STREAM), "after": raw([b"data: 1\n\n"])}) as engine:
        for name in faults(STREAM):
            async with wire(engine) as client:
                client.ask(name)
                await engine.request(len(engine.requests))
        async with wire(engine) as client:
            client.ask("after")
            await client.head()
            assert await client.body() == b"data: 1\n\n"


def test_an_empty_part_is_refused() -> None:
    """It would end a chunked body in the middle."""
    with pytest.raises(ValueError, match="would end the body"):
        Send(b"")


@pytest.mark.parametrize(
    "check",
    [
        test_a_gate_holds_the_stream_where_the_test_wants_it,
        test_a_client_that_stops_reading_stops_the_engine,
        test_a_connection_closed_mid_event_has_no_proper_end,
        test_a_reset_is_a_reset,
        test_every_fault_can_be_asked_for_by_name,
    ],
)
def test_the_same_on_uvloop(check: Callable[[], Coroutine[None, None, None]]) -> None:
    """The gateway runs on uvloop, most tests on asyncio's own loop."""
    uvloop.run(check())
