"""Requests that are framed to deceive, and clients that stay without doing anything, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import Pause, ReplayEngine, Script, Send
from support.socket_client import SocketClient
from support.transcripts import load
from tokenflow_gateway import http_protocol
from tokenflow_gateway.relay.exchange import Exchange

CHAT = "/v1/chat/completions"
PASSED = "/v1/embeddings"
LIVE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
HIDDEN = b"GET /admin/engines HTTP/1.1\r\nhost: localhost\r\n\r\n"
ANSWER = Script(headers={"content-type": "application/json"}, steps=[Send(b'{"data":[]}')])
LARGE = b'{"choices":[{"message":{"content":"' + b"x" * 12_000_000 + b'"},"finish_reason":"stop"}]}'
"""More than the kernel takes."""


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    async with ReplayEngine({**scenarios.recordings("models"), PASSED: ANSWER}) as engine:
        engine.scripts["/v1/models"] = engine.scripts["models"]
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        yield gateway


class Client:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, gateway: RunningGateway, *, receive_buffer: int = 0) -> AsyncIterator[Client]:
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        address = "127.0.0.1", int(gateway.base_url.rpartition(":")[2])
        await asyncio.get_running_loop().sock_connect(sock, address)
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            yield cls(reader, writer)
        finally:
            writer.transport.abort()

    async def until_closed(self) -> bytes:
        data = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while part := await self.reader.read(1 << 16):
                    data += part
        return data

    async def answer(self) -> bytes:
        """The next answer that has a length, or comes in one chunk."""
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            if b"transfer-encoding: chunked" in head:
                return head + await self.reader.readuntil(b"0\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return head + await self.reader.readexactly(length)


def head(*lines: str, method: str = "POST", path: str = PASSED) -> bytes:
    return "".join(
        f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", "host: localhost", *lines, "")
    ).encode()


def asked(engine: ReplayEngine, path: str = PASSED) -> list[bytes]:
    return [seen.body for seen in engine.requests if seen.path == path]


# ---- an offer to upgrade -------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("cut", [0, 1, 20])
async def test_the_body_of_a_request_that_offers_an_upgrade_is_its_body(
    gateway: RunningGateway, engine: ReplayEngine, protocol: str, cut: int
) -> None:
    """It is read by its length, in whatever reads it comes, and never taken for a further request."""
    request = head("connection: Upgrade", f"upgrade: {protocol}", f"content-length: {len(HIDDEN)}") + HIDDEN
    at = len(request) - len(HIDDEN) + cut
    async with Client.of(gateway) as client:
        client.writer.write(request[:at])
        await asyncio.sleep(0.05)
        client.writer.write(request[at:])
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        assert asked(engine) == [HIDDEN]
        client.writer.write(LIVE)
        assert b'"status":"ok"' in await client.answer()


async def test_a_chunked_body_behind_an_offer_is_read_too(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    async with Client.of(gateway) as client:
        client.writer.write(head("connection: upgrade", "upgrade: h2c", "transfer-encoding: chunked"))
        await asyncio.sleep(0.05)
        client.writer.write(b"2\r\n{}\r\n0\r\n\r\n")
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        client.writer.write(head("content-length: 2") + b"[]")
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
    assert asked(engine) == [b"{}", b"[]"]


@pytest.mark.parametrize("length", ["content-length: 0", "content-length: 00", "x: y"])
async def test_an_offer_without_a_body_is_a_request_like_others(
    gateway: RunningGateway, engine: ReplayEngine, length: str
) -> None:
    async with Client.of(gateway) as client:
        for _ in range(2):
            client.writer.write(head("connection: upgrade", "upgrade: h2c", length))
            assert (await client.answer()).startswith(b"HTTP/1.1 200")
    assert asked(engine) == [b"", b""]


async def test_an_offer_with_two_framings_is_refused(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with Client.of(gateway) as client:
        offer = ("connection: upgrade", "upgrade: h2c", "content-length: 2", "transfer-encoding: chunked")
        client.writer.write(head(*offer) + b"2\r\n{}\r\n0\r\n\r\n" + HIDDEN)
        answer = await client.until_closed()
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


# ---- trailers ------------------------------------------------------------------------------------


async def test_trailers_are_no_headers(gateway: RunningGateway, engine: ReplayEngine) -> None:
    trailers = b"authorization: Bearer other\r\nx-injected: 1\r\nx-tokenflow-rate: bad\r\nhost: other\r\n"
    async with Client.of(gateway) as client:
        client.writer.write(head("authorization: Bearer own", "transfer-encoding: chunked"))
        client.writer.write(b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n")
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
    (seen,) = [seen for seen in engine.requests if seen.path == PASSED]
    assert seen.headers["authorization"] == "Bearer own"
    assert "x-injected" not in seen.headers


@pytest.mark.parametrize("begin", [b"2\r\n{}\r\n0\r\n", b"2\r\n{}\r\n0\r\nx: ", b"2\r\n{}\r\n2;"])
async def test_what_follows_a_body_is_bounded_as_its_head(gateway: RunningGateway, begin: bytes) -> None:
    """Trailers, one endless trailer, and the extension of a chunk."""
    one = b"x: a\r\n" if begin.endswith(b"0\r\n") else b"aaaaaa"
    async with Client.of(gateway) as client:
        client.writer.write(head("transfer-encoding: chunked") + begin)
        await asyncio.sleep(0.05)  # a read that ends in a body is not looked into
        for _ in range(2 * http_protocol.MAX_HEAD_BYTES // 6000 + 1):
            client.writer.write(one * 1000)
        assert (await client.until_closed()).startswith(b"HTTP/1.1 431")


async def test_a_long_body_in_small_chunks_is_no_head(gateway: RunningGateway, engine: ReplayEngine) -> None:
    """The control."""
    async with Client.of(gateway) as client:
        client.writer.write(head("transfer-encoding: chunked"))
        for _ in range(40):
            client.writer.write(b"1\r\nx\r\n" * 1000)
            await asyncio.sleep(0)
        client.writer.write(b"0\r\n\r\n")
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
    assert asked(engine) == [b"x" * 40_000]


async def test_a_long_head_behind_a_request_does_not_answer_it(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    async with Client.of(gateway) as client:
        client.writer.write(head("content-length: 0") + b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000)
        answer = await client.until_closed()
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1


# ---- clients that stay ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stray",
    [(LIVE, b"\r\n"), (head("content-length: 9", method="GET", path="/health/live"), b"x")],
    ids=["line", "body"],
)
async def test_bytes_that_begin_no_request_do_not_keep_a_connection(
    engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch, stray: tuple[bytes, bytes]
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    request, more = stray
    async with (
        running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
        Client.of(gateway) as client,
    ):
        client.writer.write(request)
        await client.answer()
        client.writer.write(more)
        async with asyncio.timeout(4):  # less than the 5 s of a connection that nothing came on
            assert await client.reader.read() == b""


def of_type(kind: str, *steps: Send | Pause) -> Script:
    return Script(headers={"content-type": kind}, steps=steps)


@pytest.mark.parametrize("kind", ["audio/mpeg", "text/event-stream"])
async def test_a_client_that_takes_nothing_of_a_passed_answer_is_given_up(
    engine: ReplayEngine, kind: str
) -> None:
    part = b"data: " + b"x" * 65000 + b"\n\n"
    engine.scripts[PASSED] = of_type(kind, *[Send(part)] * 400)
    async with running_gateway(
        {"url": engine.base_url, "link": "off"}, delivery={"max_hold_s": 0.4}
    ) as gateway:
        client = await SocketClient.ask(gateway.base_url, PASSED, {}, receive_buffer=4096)
        client.stop_reading()
        await eventually(lambda: bool(asked(engine)), "asked")
        (seen,) = [seen for seen in engine.requests if seen.path == PASSED]
        async with asyncio.timeout(5):
            await seen.disconnected.wait()
        await eventually(lambda: gateway.metric("tokenflow_client_connections") == 0, "it is cut off")
        client.close()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_a_client_that_does_not_take_a_whole_answer_is_given_up(
    engine: ReplayEngine, connection: str
) -> None:
    """The request is over by then, and with it all that looks after it."""
    engine.scripts["large"] = of_type("application/json", Send(LARGE))
    async with running_gateway(
        {"url": engine.base_url, "link": "off"}, delivery={"max_hold_s": 0.4}
    ) as gateway:
        client = await SocketClient.ask(
            gateway.base_url,
            CHAT,
            {"model": "large", "messages": []},
            headers={"connection": connection},
            receive_buffer=4096,
        )
        client.stop_reading()
        await eventually(lambda: bool(asked(engine, CHAT)), "asked")
        await gateway.everything_released()
        await eventually(lambda: gateway.metric("tokenflow_client_connections") == 0, "it is cut off")
        client.close()


async def test_a_stream_behind_an_answer_that_is_not_taken_is_given_up_too(engine: ReplayEngine) -> None:
    """Its head waits for the connection, and a stream's own patience begins behind that."""
    engine.scripts["large"] = of_type("application/json", Send(LARGE))
    engine.scripts["endless"] = scenarios.endless(load("chat_stream"))
    async with running_gateway(
        {"url": engine.base_url, "link": "off"}, delivery={"max_hold_s": 0.8}
    ) as gateway:
        client = await SocketClient.ask(
            gateway.base_url,
            CHAT,
            {"model": "large"},
            headers={"connection": "keep-alive"},
            receive_buffer=4096,
        )
        client.stop_reading()
        await eventually(lambda: bool(asked(engine, CHAT)), "asked")
        await gateway.everything_released()
        body = b'{"model":"endless","stream":true,"messages":[]}'
        client.send(head(f"content-length: {len(body)}", path=CHAT) + body)
        await eventually(lambda: len(asked(engine, CHAT)) == 2, "asked again")
        await gateway.everything_released()
        client.close()


async def test_a_client_that_reads_slowly_gets_all(engine: ReplayEngine) -> None:
    """The control: it takes something in the time in which one that takes nothing is given up."""
    engine.scripts["large"] = of_type("application/json", Send(LARGE))
    async with running_gateway(
        {"url": engine.base_url, "link": "off"}, delivery={"max_hold_s": 0.4}
    ) as gateway:
        body = b'{"model":"large","messages":[]}'
        async with Client.of(gateway, receive_buffer=65536) as client:
            client.writer.write(head(f"content-length: {len(body)}", "connection: close", path=CHAT) + body)
            loop = asyncio.get_running_loop()
            begun, answer = loop.time(), b""
            while loop.time() - begun < 1.2:
                answer += await client.reader.read(65536)
                await asyncio.sleep(0.05)
            assert len(answer) < len(LARGE) / 2
            answer += await client.until_closed()
        assert answer.endswith(LARGE)


# ---- nothing behind the end ----------------------------------------------------------------------


async def test_nothing_is_written_behind_the_end_of_an_answer(engine: ReplayEngine) -> None:
    """What comes too late for its answer is no part of the next one either."""
    engine.scripts["chat"] = scenarios.replay(load("chat_stream"))
    exchanges: list[Exchange] = []
    begun = Exchange.__init__

    def seen(self: Exchange, *args: object) -> None:
        begun(self, *args)  # type: ignore[arg-type]
        exchanges.append(self)

    body = b'{"model":"chat","stream":true,"messages":[]}'
    request = head(f"content-length: {len(body)}", path=CHAT) + body
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "__init__", seen)
        async with (
            running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
            Client.of(gateway) as client,
        ):
            client.writer.write(request)
            await client.answer()
            (exchange,) = exchanges
            assert exchange.complete
            assert not exchange.writable
            exchange.write_now(b": ping\n\n")
            client.writer.write(request)
            assert (await client.answer()).startswith(b"HTTP/1.1 200")


# ---- paths and headers of one hop ----------------------------------------------------------------


@pytest.mark.parametrize("segment", [".", "..", "%2e%2e", ".%2E"])
@pytest.mark.parametrize(("method", "end"), [("GET", ""), ("POST", "/cancel")])
async def test_a_dot_segment_is_no_response(
    gateway: RunningGateway, engine: ReplayEngine, segment: str, method: str, end: str
) -> None:
    async with Client.of(gateway) as client:
        client.writer.write(head("content-length: 0", method=method, path=f"/v1/responses/{segment}{end}"))
        assert (await client.answer()).startswith(b"HTTP/1.1 404")
    assert not [seen for seen in engine.requests if "responses" in seen.path]


async def test_what_connection_names_stays_with_its_hop(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    async with Client.of(gateway) as client:
        named = ("X-Hop: 1", "x-kept: 1", "connection: Keep-Alive, x-hop", "proxy-connection: x")
        client.writer.write(head(*named, "content-length: 2") + b"{}")
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
    (seen,) = [seen for seen in engine.requests if seen.path == PASSED]
    assert seen.headers["x-kept"] == "1"
    assert not {"x-hop", "proxy-connection"} & set(seen.headers)
