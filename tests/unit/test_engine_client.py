"""The client of engines on real sockets: reuse, back-pressure, what goes wrong, what is sent."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from support.engine_talk import CHUNKED, OK, PLAIN, Talk, closing, talk
from support.gateway import eventually
from support.raw_engine import Asked, RawEngine
from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.relay import engine_pool
from tokenflow_gateway.relay.engine_pool import EngineConnection, EnginePool, Origin
from tokenflow_gateway.relay.errors import ConnectTimeout, EngineUnreachable, NoEngine
from tokenflow_gateway.relay.upstream import Upstream

# ---- connections -------------------------------------------------------------------------------------------


async def test_a_connection_serves_one_request_after_another() -> None:
    async with talk(lambda _: CHUNKED) as made:
        for _ in range(5):
            assert await made.read() == b"hello, world"
        assert made.raw.connections == 1


@pytest.mark.parametrize(
    "said",
    [
        OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
async def test_a_connection_that_is_to_be_closed_is_not_kept(said: bytes) -> None:
    async with talk(lambda _: said) as made:
        assert [await made.read() for _ in range(2)] == [b"hello", b"hello"]
        assert made.raw.connections == 2


async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    go = asyncio.Event()

    async def answer(asked: Asked) -> None:
        await go.wait()
        asked.writer.write(PLAIN)

    async with talk(answer) as made:
        reads = [asyncio.create_task(made.read()) for _ in range(20)]
        await eventually(lambda: len(made.raw.asked) == 20, "all have come")
        go.set()
        assert await asyncio.gather(*reads) == [b"hello"] * 20
        assert made.raw.connections == 20


class _Written(asyncio.Transport):
    """Keeps what is written, in the order of everything else that happens."""

    def __init__(self, happened: list[bytes]) -> None:
        super().__init__()
        self._happened = happened
        self._closing = False

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self._happened.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self._closing = True


async def test_a_request_is_written_behind_what_was_to_be_done_before() -> None:
    """The link sends a stream's announcement as the next turn of the loop begins: it has to be ahead."""
    happened: list[bytes] = []
    connection = EngineConnection(EnginePool(), Origin("127.0.0.1", 1, tls=False))
    connection.connection_made(_Written(happened))
    asyncio.get_running_loop().call_soon(happened.append, b"announced")
    connection.ask(b"head", b"body", method="POST")
    assert not happened
    await asyncio.sleep(0)
    assert happened == [b"announced", b"headbody"]


async def test_a_request_that_is_left_before_it_is_written_is_not_written() -> None:
    happened: list[bytes] = []
    connection = EngineConnection(EnginePool(), Origin("127.0.0.1", 1, tls=False))
    connection.connection_made(_Written(happened))
    connection.ask(b"head", b"body", method="POST")
    connection.leave()
    await asyncio.sleep(0)
    assert not happened
    assert not connection.usable


async def test_an_answer_left_before_its_end_closes_the_connection_at_once() -> None:
    gone = asyncio.Event()

    async def answer(asked: Asked) -> None:
        asked.writer.write(OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await asked.writer.drain()
        with suppress(ConnectionError):
            await asked.reader.read()
        gone.set()

    async with talk(answer) as made:
        async with made.ask() as left:
            assert await left.content.readany() == b"hello"
        async with asyncio.timeout(10):
            await gone.wait()


@pytest.mark.parametrize("where", ["head", "body"])
async def test_cancelled_wherever_it_waits_it_leaves_no_connection(where: str) -> None:
    async def answer(asked: Asked) -> None:
        if where == "body":
            asked.writer.write(OK + b"content-length: 5\r\n\r\nhe")
        await asked.reader.read()

    async with talk(answer) as made:
        task = asyncio.create_task(made.read())
        await eventually(lambda: bool(made.raw.asked), "the request has come")
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        await eventually(lambda: made.raw.open_connections == 0, "the connection is closed")
        await eventually(lambda: not made.upstream._pool.open, "it is forgotten")


async def test_an_engine_that_closes_an_idle_connection_costs_nothing() -> None:
    async with talk(closing(PLAIN)) as made:
        assert await made.read() == b"hello"
        await eventually(lambda: not made.upstream._pool.open, "the close has been seen")
        assert await made.read() == b"hello"


async def test_idle_connections_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "_KEEPALIVE_S", 0.05)
    async with talk(lambda _: PLAIN) as made:
        assert await made.read() == b"hello"
        assert made.raw.open_connections == 1
        await eventually(lambda: made.raw.open_connections == 0, "it is closed")
        assert not any(made.upstream._pool._kept.values())


async def test_a_kept_connection_that_closes_as_the_request_comes_is_no_failure() -> None:
    def answer(asked: Asked) -> Any:
        return closing(b"")(asked) if len(made.raw.asked) == 2 else PLAIN

    async with talk(answer) as made:
        assert [await made.read() for _ in range(2)] == [b"hello", b"hello"]
        assert [asked.connection for asked in made.raw.asked] == [0, 0, 1]


async def test_after_a_byte_of_answer_nothing_is_asked_again() -> None:
    def answer(asked: Asked) -> Any:
        return closing(b"H")(asked) if len(made.raw.asked) == 2 else PLAIN

    async with talk(answer) as made:
        await made.read()
        with pytest.raises(EngineUnreachable):
            await made.read()
        assert len(made.raw.asked) == 2


async def test_a_new_connection_that_is_closed_without_an_answer_is_a_failure() -> None:
    async with talk(closing(b"")) as made:
        with pytest.raises(EngineUnreachable):
            await made.read()
        assert len(made.raw.asked) == 1


async def test_of_one_request_one_connection_is_replaced_and_those_kept_beside_it_are_dropped() -> None:
    """An engine that dies of a request would else be killed with it again and again."""
    poisonous = False
    go = asyncio.Event()

    async def wait(asked: Asked) -> None:
        await go.wait()
        asked.writer.write(PLAIN)

    async with talk(lambda asked: closing(b"")(asked) if poisonous else wait(asked)) as made:
        reads = [asyncio.create_task(made.read()) for _ in range(4)]
        await eventually(lambda: len(made.raw.asked) == 4, "all have come")
        go.set()
        await asyncio.gather(*reads)
        poisonous = True
        request = made.ask()
        with pytest.raises(EngineUnreachable):
            await request.__aenter__()
        assert len(made.raw.asked) == 4 + 2
        assert not request.may_replace
        assert not any(made.upstream._pool._kept.values())


async def test_a_request_that_had_a_connection_replaced_has_none_more() -> None:
    async with talk(lambda asked: closing(b"")(asked) if len(made.raw.asked) == 2 else PLAIN) as made:
        await made.read()
        with pytest.raises(EngineUnreachable):
            await made.read(may_replace=False)
        assert len(made.raw.asked) == 2


async def test_a_kept_connection_lost_long_after_the_request_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenflow_gateway.relay.upstream._STALE_S", 0.02)

    async def late(asked: Asked) -> None:
        await asyncio.sleep(0.05)
        asked.writer.close()

    async with talk(lambda asked: late(asked) if len(made.raw.asked) == 2 else PLAIN) as made:
        await made.read()
        with pytest.raises(EngineUnreachable):
            await made.read()
        assert len(made.raw.asked) == 2


async def test_a_silent_address_of_a_name_does_not_hide_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with talk(lambda _: PLAIN) as made:
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            waiting = [socket.socket() for _ in range(4)]
            for sock in waiting:
                sock.setblocking(False)
                sock.connect_ex(deaf.getsockname())
            port = int(made.raw.url.rpartition(":")[2])
            addresses = [(socket.AF_INET, deaf.getsockname()), (socket.AF_INET, ("127.0.0.1", port))]

            async def both(origin: object) -> Any:
                return addresses

            monkeypatch.setattr(made.upstream._pool, "_addresses_of", both)
            assert await made.read(connect_s=2.0) == b"hello"
            for sock in waiting:
                sock.close()


async def test_of_several_addresses_that_refuse_the_failure_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = (socket.AF_INET, taken.getsockname())
    with pytest.raises(ConnectionRefusedError):
        await engine_pool._first_to_answer([address, address])


async def test_no_engine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    made = Talk(cast(RawEngine, None), Upstream(), Engine(EngineConfig(url=f"http://127.0.0.1:{port}")))
    with pytest.raises(NoEngine):
        await made.read()
    await made.upstream.close()


async def test_a_name_that_is_nobodys() -> None:
    made = Talk(cast(RawEngine, None), Upstream(), Engine(EngineConfig(url="http://nobody.invalid:1")))
    with pytest.raises((NoEngine, ConnectTimeout)):
        await made.read(connect_s=2.0)


async def test_an_engine_that_takes_no_connection_in_time() -> None:
    """A listener whose queue is full lets further ones wait."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        port = listener.getsockname()[1]
        made = Talk(cast(RawEngine, None), Upstream(), Engine(EngineConfig(url=f"http://127.0.0.1:{port}")))
        with pytest.raises(ConnectTimeout):
            await made.read(connect_s=0.1)
        assert not made.upstream._pool.open
        for sock in waiting:
            sock.close()


async def test_a_reader_that_waits_holds_the_engine_up_and_gets_everything() -> None:
    sent = 0
    size = 20_000_000

    async def answer(asked: Asked) -> None:
        nonlocal sent
        asked.writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            asked.writer.write(b"x" * 10_000)
            await asked.writer.drain()
            sent += 10_000

    async with talk(answer) as made, made.ask() as large:
        assert len(await large.content.read(1)) == 1
        before = -1
        while before != sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.1)
        assert large.content._bytes < 32 * 1024 + 256 * 1024
        assert sent < 8_000_000
        assert len(await large.read()) == size - 1
        assert sent == size


# ---- what is sent ------------------------------------------------------------------------------------------


async def test_the_request_as_the_engine_sees_it() -> None:
    headers = [
        (b"x-own", b"1"),
        (b"authorization", b"Bearer client"),
        (b"cookie", b"c"),
        (b"transfer-encoding", b"chunked"),
        (b"x-tokenflow-rate", b"5"),
        (b"x-override-rid", b"theirs"),
    ]
    async with talk(lambda _: PLAIN, prefix="/base") as made:
        await made.read(
            headers=headers, path_qs="/v1/x?a=%20b", body=b"{}", own_headers=[(b"x-override-rid", b"r")]
        )
        await made.read(body=None, method="POST")
        await made.read(body=None, method="GET")
        first, second, third = (asked.head.split(b"\r\n")[:-2] for asked in made.raw.asked)
    host = b"host: " + made.raw.url.removeprefix("http://").encode()
    assert first[0] == b"POST /base/v1/x?a=%20b HTTP/1.1"
    assert sorted(first[1:]) == sorted(
        [
            host,
            b"accept-encoding: identity",
            b"x-own: 1",
            b"authorization: Bearer client",
            b"content-length: 2",
            b"x-override-rid: r",
            b"x-request-id: q",
        ]
    )
    assert b"content-length: 0" in second
    assert not any(line.startswith(b"content-length") for line in third)


async def test_a_key_of_the_engine_takes_the_place_of_the_clients() -> None:
    async with talk(lambda _: PLAIN, api_key="secret") as made:
        theirs = [(b"authorization", b"Bearer client"), (b"x-api-key", b"client"), (b"api-key", b"client")]
        await made.read(headers=theirs)
        head = made.raw.asked[0].head
    assert b"authorization: Bearer secret\r\n" in head
    assert b"client" not in head


async def test_a_large_body_arrives_whole() -> None:
    body = bytes(range(256)) * 40_000
    async with talk(lambda _: PLAIN) as made:
        assert await made.read(body=body) == b"hello"
        assert made.raw.asked[0].body == body


async def test_what_was_half_sent_is_not_used_again() -> None:
    """An engine that refuses a large body before it has read it."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await broken_off.wait()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()

    broken_off, closed = asyncio.Event(), asyncio.Event()
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        made = Talk(cast(RawEngine, None), Upstream(), Engine(EngineConfig(url=url)))
        async with made.ask(body=bytes(10_000_000)) as answer:
            assert answer.status == 413
            assert await answer.read() == b""
        await eventually(lambda: not made.upstream._pool.open, "the connection is closed")
        broken_off.set()
        await closed.wait()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Key and certificate of 127.0.0.1, signed by itself."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, certificate


async def test_tls(certificate: tuple[Path, Path]) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate[1], certificate[0])
    async with talk(lambda _: CHUNKED, tls=server) as made:
        with pytest.raises(NoEngine):  # nobody vouches for this certificate
            await made.read()
        made.upstream._pool.__dict__["_tls"] = ssl.create_default_context(cafile=str(certificate[1]))
        assert [await made.read() for _ in range(2)] == [b"hello, world"] * 2
        assert len(made.raw.asked) == 2
