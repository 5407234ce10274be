"""What a client may do on a connection before it is known what it wants, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable
from typing import Any, cast

import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.raw_engine import Asked, raw_engine
from support.replay_engine import ReplayEngine
from support.transcripts import load
from tokenflow_gateway import http_protocol

CHAT = "/v1/chat/completions"


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.recordings("models", "chat_plain")
    scripts["/v1/models"] = scripts["models"]
    scripts["silent"] = scenarios.never_answers()
    scripts["stream"] = scenarios.replay(load("chat_stream"))
    scripts["endless"] = scenarios.endless(load("chat_stream"))
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        yield gateway


def post(model: str, *, stream: bool = False, said: str = "", connection: str = "keep-alive") -> bytes:
    body = json.dumps({"model": model, "stream": stream, "messages": [said]}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: {connection}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def connect(gateway: RunningGateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(gateway.base_url.rpartition(":")[2]))


@pytest.mark.parametrize("model", ["silent", "endless"])
async def test_a_client_that_pipelines_and_leaves_is_noticed(
    gateway: RunningGateway, engine: ReplayEngine, model: str
) -> None:
    """Uvicorn alone stops reading at the second request, and so never sees the end of the connection."""
    _, writer = await connect(gateway)
    writer.write(post(model, stream=model == "endless"))
    await eventually(lambda: any(seen.path == CHAT for seen in engine.requests), "asked")
    writer.write(post("chat_plain"))
    await writer.drain()
    writer.transport.abort()
    (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
    async with asyncio.timeout(10):
        await seen.disconnected.wait()
    await gateway.everything_released()


async def test_the_first_of_two_pipelined_requests_is_answered_and_the_connection_closed(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    reader, writer = await connect(gateway)
    writer.write(post("chat_plain") + post("chat_plain"))
    async with asyncio.timeout(5):
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert b"Paris" in answer
    assert len([seen for seen in engine.requests if seen.path == CHAT]) == 1
    writer.close()


async def test_requests_one_after_another_share_a_connection(gateway: RunningGateway) -> None:
    """The control: keep-alive works."""
    reader, writer = await connect(gateway)
    for _ in range(3):
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(b'{"status":"ok"}'))
        assert head.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_request_with_the_head_of_the_one_before_is_taken_as_any_other(
    gateway: RunningGateway, engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does without the parser, if it comes as a whole: whatever differs in its head does not."""
    parsed: list[bytes] = []
    feed = http_protocol.BoundedHttpProtocol._feed

    def watched(protocol: http_protocol.BoundedHttpProtocol, data: bytes) -> None:
        parsed.append(data)
        feed(protocol, data)

    monkeypatch.setattr(http_protocol.BoundedHttpProtocol, "_feed", watched)
    reader, writer = await connect(gateway)

    async def answered(*parts: bytes) -> int:
        """How many reads went to the parser."""
        parsed.clear()
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            assert b"Paris" in await reader.readexactly(int(length[1]))
        return len(parsed)

    said = [post("chat_plain", said="x" * count) for count in (1, 1, 300, 0)]
    other = said[0].replace(b"host: localhost", b"x-tokenflow-reader: machine\r\nhost: localhost")
    chunked = other.replace(b"content-length: ", b"transfer-encoding: chunked\r\nx-length: ")
    chunked = chunked.replace(b"\r\n\r\n", b"\r\n\r\n%x\r\n" % int(said[0].split(b"length: ")[1].split()[0]))
    assert [await answered(one) for one in said] == [1, 1, 0, 0]
    assert await answered(said[2][:-10], said[2][-10:]) == 2, "in two parts"
    assert [await answered(one) for one in (said[3], other, other, said[2], said[2])] == [0, 1, 0, 1, 0]
    assert await answered(chunked + b"\r\n0\r\n\r\n") == 1
    bodies = [json.loads(seen.body)["messages"][0] for seen in engine.requests if seen.path == CHAT]
    lengths = [1, 1, 300, 0, 300, 0, 1, 1, 300, 300, 1]
    assert [len(body) for body in bodies] == lengths
    writer.write(said[1] + said[1])  # of two at once the first is answered, as ever
    async with asyncio.timeout(5):
        assert (await reader.read()).count(b"HTTP/1.1 200") == 1
    writer.close()


async def test_a_body_with_a_known_head_is_here_for_every_application(gateway: RunningGateway) -> None:
    """The control API waits to be told of a body, where the relay looks for it."""
    reader, writer = await connect(gateway)
    for _ in range(4):
        writer.write(
            b"POST /v1/streams/tf-1/progress HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
        )
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))
    writer.close()


async def test_a_connection_is_closed_once_it_has_brought_no_request_for_a_while(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from the last answer, however long the connection has been in use."""
    monkeypatch.setattr(gateway.server.config, "timeout_keep_alive", 0.3)
    loop = asyncio.get_running_loop()
    reader, writer = await connect(gateway)
    begun, answers = loop.time(), 0
    async with asyncio.timeout(10):
        while loop.time() < begun + 1.0:
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b'{"status":"ok"}')
            answered, answers = loop.time(), answers + 1
        assert await reader.read() == b""
    assert answers > 3
    assert 0.2 < loop.time() - answered < 2.0
    writer.close()


async def test_a_stream_is_no_idle_connection(
    gateway: RunningGateway, engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on beyond the time for the next request, which begins anew behind it."""
    monkeypatch.setattr(gateway.server.config, "timeout_keep_alive", 0.2)
    loop = asyncio.get_running_loop()
    reader, writer = await connect(gateway)
    async with asyncio.timeout(10):
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')
        writer.write(post("endless", stream=True))
        begun = loop.time()
        while loop.time() < begun + 0.6:
            await reader.readuntil(b"data: ")
    writer.close()
    await gateway.everything_released()


async def test_streams_one_after_another_share_a_connection(gateway: RunningGateway) -> None:
    reader, writer = await connect(gateway)
    async with asyncio.timeout(5):
        for _ in range(3):
            writer.write(post("stream", stream=True))
            answer = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.count(b"transfer-encoding: chunked\r\n") == 1
            assert b"connection:" not in answer
        writer.write(post("stream", stream=True, connection="close"))
        answer = await reader.read()
    assert b"\r\nconnection: close\r\n" in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


class Recorded:
    """A transport, and what is written to it."""

    def __init__(self, transport: asyncio.Transport, written: list[bytes]) -> None:
        self._transport = transport
        self._written = written

    def write(self, data: bytes) -> None:
        self._written.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is written to the connections of clients."""
    made, found = http_protocol.BoundedHttpProtocol.connection_made, list[bytes]()
    monkeypatch.setattr(
        http_protocol.BoundedHttpProtocol,
        "connection_made",
        lambda self, transport: made(self, cast(asyncio.Transport, Recorded(transport, found))),
    )
    return found


async def streamed(gateway: RunningGateway) -> bytes:
    reader, writer = await connect(gateway)
    writer.write(post("stream", stream=True))
    async with asyncio.timeout(10):
        answer = await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return answer


def in_one_read(asked: Asked) -> bytes:
    """An engine's answer that is here as a whole."""
    if CHAT.encode() not in asked.head:
        kind, body = b"application/json", b'{"object":"list","data":[{"id":"stream","object":"model"}]}'
    else:
        kind, body = b"text/event-stream", load("chat_stream").data
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


async def test_an_answer_that_is_here_as_a_whole_leaves_in_one_write(written: list[bytes]) -> None:
    """A write costs more than most else in a short answer."""
    async with (
        raw_engine(in_one_read) as engine,
        running_gateway({"url": engine.url, "link": "off"}) as gateway,
    ):
        answer = await streamed(gateway)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" in answer
    assert written == [answer]


async def test_nothing_of_a_whole_answer_is_left_for_the_next_one_on_its_connection() -> None:
    begun = asyncio.Event()

    async def in_two_reads(asked: Asked) -> None:
        answer = in_one_read(asked)
        asked.writer.write(answer[:-200])
        await begun.wait()
        asked.writer.write(answer[-200:])

    def answer(asked: Asked) -> Awaitable[None] | bytes:
        return in_two_reads(asked) if b"slowly" in asked.body else in_one_read(asked)

    async with (
        raw_engine(answer) as engine,
        running_gateway({"url": engine.url, "link": "off"}) as gateway,
    ):
        reader, writer = await connect(gateway)
        async with asyncio.timeout(10):
            writer.write(post("stream", stream=True))
            whole = await reader.readuntil(b"0\r\n\r\n")
            writer.write(post("stream", stream=True, said="slowly"))
            first = await reader.readuntil(b"data: ")
            begun.set()
            rest = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    assert whole.count(b"HTTP/1.1 200") == (first + rest).count(b"HTTP/1.1 200") == 1
    assert first.startswith(b"HTTP/1.1 200")


async def test_the_head_of_a_stream_leaves_alone(gateway: RunningGateway, written: list[bytes]) -> None:
    """The larger the first segment, the less a small receive buffer tells of its reader."""
    answer = await streamed(gateway)
    assert len(written) > 2
    assert written[0] == answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    assert b"".join(written) == answer


async def test_who_leaves_after_a_large_request_is_noticed(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """The server stops reading where a body is large."""
    _, writer = await connect(gateway)
    writer.write(post("silent", said="a" * 300_000))
    await eventually(lambda: any(seen.path == CHAT for seen in engine.requests), "asked")
    writer.transport.abort()
    (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
    async with asyncio.timeout(10):
        await seen.disconnected.wait()


@pytest.mark.parametrize("pieces", [1, 100])
async def test_a_head_without_end_is_refused(gateway: RunningGateway, pieces: int) -> None:
    reader, writer = await connect(gateway)
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nx: ")
    for _ in range(pieces):
        writer.write(b"y" * (100_000 // pieces))
    async with asyncio.timeout(5):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /health/live HTT"])
async def test_a_head_that_does_not_come_is_not_waited_for(
    engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        reader, writer = await connect(gateway)
        writer.write(sent)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


async def test_a_body_that_does_not_come_is_408(engine: ReplayEngine) -> None:
    async with running_gateway({"url": engine.base_url, "link": "off"}, timeouts={"body_s": 0.2}) as gateway:
        reader, writer = await connect(gateway)
        writer.write(post("chat_plain")[:-5])
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_what_is_no_request_is_refused_in_openais_shape(gateway: RunningGateway) -> None:
    reader, writer = await connect(gateway)
    writer.write(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
    async with asyncio.timeout(5):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    writer.close()


async def test_bytes_that_are_no_request_never_mix_with_an_answer(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """A client that sends garbage while its stream runs loses the stream; no second head comes inside it."""
    reader, writer = await connect(gateway)
    writer.write(post("endless", stream=True))
    async with asyncio.timeout(5):
        await reader.readuntil(b"data: ")
        writer.write(b"\x00\x01\x02\r\n\r\n")
        rest = b""
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                rest += part
    assert b"HTTP/1.1" not in rest
    (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
    async with asyncio.timeout(10):
        await seen.disconnected.wait()
    await gateway.everything_released()
    writer.close()


@pytest.mark.parametrize("refused", [b"POST /health/live", b"OPTIONS /v1/chat/completions"])
async def test_a_body_that_looks_like_the_request_before_is_none(
    gateway: RunningGateway, engine: ReplayEngine, refused: bytes
) -> None:
    """Of a request that was answered at its head, so that nobody waits for the rest of it."""
    reader, writer = await connect(gateway)
    known = post("chat_plain")
    for _ in range(3):
        writer.write(known)
        await _whole_answer(reader)
    inside = known * 2
    writer.write(refused + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(inside))
    await _whole_answer(reader)
    for _ in range(2):
        writer.write(known)
        await asyncio.sleep(0.1)
    assert len([seen for seen in engine.requests if seen.path == CHAT]) == 3
    writer.write(known)
    assert b"Paris" in await _whole_answer(reader)
    assert len([seen for seen in engine.requests if seen.path == CHAT]) == 4
    writer.close()


async def _whole_answer(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        return await reader.readexactly(int(length[1])) if length else b""


async def test_line_ends_between_two_requests_are_no_part_of_the_head_before(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """Which a parser skips: the body of the next request begins where its head ends."""
    reader, writer = await connect(gateway)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: ".encode()
    for _ in range(2):
        writer.write(head + b"0\r\n\r\n\r\n")
        assert b"error" in await _whole_answer(reader)
    body = post("chat_plain").partition(b"\r\n\r\n")[2]
    writer.write(head + b"%d\r\n\r\n\r\n%b" % (len(body), body))
    assert b"error" in await _whole_answer(reader)
    assert not [seen for seen in engine.requests if seen.path == CHAT]
    writer.close()
