"""Answers of engines as they are read: framing at every split, content codings, passing on."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from itertools import accumulate, pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engine_talk import CHUNKED, OK, PLAIN, UNTIL_CLOSE, talk
from support.gateway import eventually
from tokenflow_gateway.relay.engine_answer import MAX_HEAD_BYTES, READ_BYTES, EngineAnswer, KnownHead
from tokenflow_gateway.relay.errors import EngineUnreachable

# ---- framing ---------------------------------------------------------------------------------------------


class Transport:
    """Stands in for a connection of which nothing is asked here but to be open."""

    def __init__(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def fed(*reads: bytes, to_head: bool = False) -> tuple[EngineAnswer, list[bool]]:
    answer = EngineAnswer(asyncio.get_running_loop(), cast(asyncio.Transport, Transport()), to_head=to_head)
    return answer, [answer.received(data) for data in reads]


async def test_framing_holds_at_every_split() -> None:
    interim = b"HTTP/1.1 100 Continue\r\nx-i: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n"
    for stream, body in ((PLAIN, b"hello"), (CHUNKED, b"hello, world"), (interim + CHUNKED, b"hello, world")):
        for at in range(1, len(stream)):
            answer, trusted = fed(stream[:at], stream[at:])
            assert (answer.status, await answer.read(), answer.complete, answer.reusable) == (
                200,
                body,
                True,
                True,
            )
            assert trusted == [True, True]
    assert answer.headers == {b"transfer-encoding": b"chunked", b"x-a": b"1, 2"}


async def test_framing_holds_byte_by_byte() -> None:
    answer, _ = fed(*(CHUNKED[at : at + 1] for at in range(len(CHUNKED))))
    assert (await answer.read(), answer.reusable) == (b"hello, world", True)


HEAD = OK + b"date: now\r\ntransfer-encoding: chunked\r\n\r\n"
BODIES = {
    "usual": b"5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n",
    "large and small letters": b"a\r\n0123456789\r\nA\r\n0123456789\r\n000\r\n\r\n",
    "a chunk that looks like the end": b"5\r\n0\r\n\r\n\r\n0\r\n\r\n",
    "trailer": b"5\r\nhello\r\n0\r\nx: 1\r\n\r\n",
    "extension": b"5\r\nhello\r\n5;x=1\r\nworld\r\n0\r\n\r\n",
    "another answer behind": b"5\r\nhello\r\n0\r\n\r\n" + PLAIN,
    "no size": b"5\r\nhello\r\n\r\n",
    "no number": b"5\r\nhello\r\nzz\r\nhello\r\n",
    "negative": b"5\r\nhello\r\n-1\r\n\r\n",
    "space": b"5\r\nhello\r\n 5\r\nhello\r\n0\r\n\r\n",
    "too short": b"6\r\nhello\r\n0\r\n\r\n",
    "too long": b"4\r\nhello\r\n0\r\n\r\n",
    "bare line feeds": b"5\nhello\n0\n\n",
    "larger than any": b"ffffffffffffffff1\r\nhello\r\n",
    "cut off": b"5\r\nhello\r\n",
}


async def made_of(
    reads: list[bytes], known: KnownHead | None
) -> tuple[list[bool], EngineAnswer, bytes, str | None]:
    """Which reads left the connection to be trusted, the answer, its body, and how that failed."""
    loop = asyncio.get_running_loop()
    transport = cast(asyncio.Transport, Transport())
    answer = EngineAnswer(loop, transport, to_head=False, known=known)
    trusted = [answer.received(data) for data in reads]
    answer.ended()
    body = b""
    try:
        while data := await answer.content.readany():
            body += data
    except EngineUnreachable as error:
        return trusted, answer, body, str(error)
    return trusted, answer, body, None


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_behind_a_known_head_all_is_as_the_parser_has_it(body: bytes) -> None:
    """At every split, and byte by byte."""
    stream = HEAD + body
    _, first, _, _ = await made_of([HEAD + BODIES["usual"]], None)
    assert first.learned == KnownHead(HEAD, {b"date": b"now", b"transfer-encoding": b"chunked"})
    splits = [[stream[:at], stream[at:]] for at in range(len(HEAD), len(stream))]
    splits += [[HEAD[:9], stream[9:]], [stream[at : at + 1] for at in range(len(stream))]]
    splits += [
        [stream[:at], stream[at : at + 3], stream[at + 3 :]] for at in range(len(HEAD), len(stream) - 3)
    ]
    for reads in splits:
        wanted = await made_of(reads, None)
        found = await made_of(reads, first.learned)
        assert (found[0], found[2:]) == (wanted[0], wanted[2:]), reads
        for name in ("status", "headers", "complete", "reusable", "begun"):
            assert getattr(found[1], name) == getattr(wanted[1], name), (name, reads)


async def test_only_usual_heads_are_known_again() -> None:
    end = b"\r\n0\r\n\r\n"
    for head in (
        OK + b"content-length: 5\r\n\r\nhello",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" + HEAD + end[2:],
        b"HTTP/1.1 404 Not Found\r\ntransfer-encoding: chunked\r\n" + end,
        OK + b"connection: close\r\ntransfer-encoding: chunked\r\n" + end,
        OK + b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n" + end,
    ):
        _, answer, _, _ = await made_of([head], None)
        assert answer.status in {200, 404}
        assert answer.learned is None
    _, answer, _, _ = await made_of([HEAD[:20], HEAD[20:] + end[2:]], None)
    assert (answer.complete, answer.learned) == (True, None)


async def test_a_body_until_the_close_is_whole_with_it_and_not_before() -> None:
    answer, _ = fed(UNTIL_CLOSE)
    assert (answer.content_type, answer.complete, answer.content_length) == ("text/event-stream", False, None)
    answer.ended()
    assert (await answer.read(), answer.reusable) == (b"hello, world", False)


@pytest.mark.parametrize("stream", [PLAIN, CHUNKED])
async def test_a_body_cut_off_anywhere_is_given_up_to_there_and_then_raises(stream: bytes) -> None:
    begin = stream.index(b"\r\n\r\n") + 4
    for at in range(begin, len(stream)):
        answer, _ = fed(stream[:at])
        answer.ended()
        got = b""
        with pytest.raises(EngineUnreachable):
            while data := await answer.content.readany():
                got += data
        assert b"hello, world".startswith(got)


async def test_what_follows_the_answer_unasked_is_not_taken_for_the_next_one() -> None:
    answer, trusted = fed(PLAIN + PLAIN)
    assert (await answer.read(), answer.reusable, trusted) == (b"hello", False, [False])
    answer, trusted = fed(PLAIN, PLAIN)
    assert (await answer.read(), trusted) == (b"hello", [True, False])


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH\r\n",
        OK + b"content-length: x\r\n\r\n",
        OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        OK + b"x: " + b"y" * MAX_HEAD_BYTES,
        OK + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * MAX_HEAD_BYTES,
        OK + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 4 * MAX_HEAD_BYTES,
        b"HTTP/1.1 099 X\r\ncontent-length: 0\r\n\r\n",
        OK + b"content-encoding: br\r\ncontent-length: 5\r\n\r\nhello",
    ],
    ids=[
        "ssh",
        "length",
        "two framings",
        "chunk size",
        "upgrade",
        "large head",
        "trailers",
        "chunk extension",
        "status 99",
        "br",
    ],
)
async def test_an_answer_that_cannot_be_trusted_is_a_lost_engine(said: bytes) -> None:
    async with talk(lambda _: said) as made:
        with pytest.raises(EngineUnreachable):
            await made.read()
        await eventually(lambda: made.raw.open_connections == 0, "the connection is closed")


@pytest.mark.parametrize(
    ("method", "said"),
    [("HEAD", OK + b"content-length: 5\r\n\r\n"), ("POST", b"HTTP/1.1 204 No Content\r\n\r\n")],
)
async def test_answers_without_a_body_end_with_their_head(method: str, said: bytes) -> None:
    async with talk(lambda _: said) as made:
        assert await made.read(method=method) == b""


# ---- content codings, of engines that send them unasked ----------------------------------------------------

TEXT = b"data: some text\n\n" * 5000


def _bare_deflate(data: bytes) -> bytes:
    engine = zlib.compressobj(wbits=-15)
    return engine.compress(data) + engine.flush()


@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        (b"gzip", gzip.compress(TEXT)),
        (b"X-Gzip", gzip.compress(TEXT[:999]) + gzip.compress(TEXT[999:])),
        (b"deflate", zlib.compress(TEXT)),
        (b"deflate", _bare_deflate(TEXT)),
        (b"identity", TEXT),
    ],
    ids=["gzip", "two members", "zlib", "bare deflate", "identity"],
)
async def test_compressed_bodies_are_read_at_any_split(coding: bytes, packed: bytes) -> None:
    head = OK + b"content-encoding: " + coding + b"\r\ncontent-length: %d\r\n\r\n" % len(packed)
    for split in (1, 2, 3, 10, len(packed) // 2, len(packed) - 1):
        answer, _ = fed(head, packed[:split], packed[split:])
        assert await answer.read() == TEXT
        answer, _ = fed(head, packed[:split], packed[split:])
        got: list[bytes] = []
        assert await answer.content.pass_to(lambda data, got=got: not got.append(data))  # type: ignore[misc]
        assert b"".join(got) == TEXT


@pytest.mark.parametrize("packed", [gzip.compress(TEXT)[:-9], b"not gzip at all", zlib.compress(TEXT)])
async def test_a_compressed_body_that_is_broken_is_a_lost_engine(packed: bytes) -> None:
    answer, _ = fed(OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed)
    with pytest.raises(EngineUnreachable):
        await answer.read()


async def test_a_small_body_that_inflates_to_a_large_one_is_read_in_bounded_pieces() -> None:
    packed = gzip.compress(bytes(50_000_000))
    answer, _ = fed(OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed)
    sizes = []
    while data := await answer.content.read(8192):
        sizes.append(len(data))
    assert (sum(sizes), max(sizes)) == (50_000_000, 8192)


# ---- pass_to -----------------------------------------------------------------------------------------------


@given(
    st.lists(st.binary(min_size=1, max_size=3 * READ_BYTES), max_size=12),
    st.integers(1, 7),
    st.integers(0, 99),
)
async def test_passed_on_or_read_nothing_is_lost_or_out_of_order(
    reads: list[bytes], stop_every: int, seed: int
) -> None:
    """Pieces taken within the read, held while nobody takes, read by hand: all in one order."""
    answer, _ = fed(OK + b"\r\n")
    drawn = random.Random(seed)  # noqa: S311 - of hypothesis' making
    got: list[bytes] = []

    def take(data: bytes) -> bool:
        assert 0 < len(data) <= READ_BYTES
        got.append(data)
        return len(got) % stop_every != 0

    async def all_of_it() -> None:
        while not await answer.content.pass_to(take):
            if drawn.random() < 0.5:
                got.append(await answer.content.read(drawn.randint(1, 2 * READ_BYTES)))
            await asyncio.sleep(0)

    task = asyncio.create_task(all_of_it())
    for data in reads:
        answer.received(data)
        if drawn.random() < 0.5:
            await asyncio.sleep(0)
    answer.ended()
    await task
    assert b"".join(got) == b"".join(reads)


async def test_what_take_raises_reaches_the_reader_and_a_loss_too() -> None:
    answer, _ = fed(OK + b"\r\n")
    reading = asyncio.ensure_future(answer.content.pass_to(lambda data: bool(1 / 0)))
    await asyncio.sleep(0)
    answer.received(b"x")
    answer.received(b"y")
    with pytest.raises(ZeroDivisionError):
        await reading
    assert await answer.content.readany() == b"y"
    reading = asyncio.ensure_future(answer.content.pass_to(lambda data: True))
    await asyncio.sleep(0)
    answer.lost()
    with pytest.raises(EngineUnreachable):
        await reading


async def test_many_chunks_of_one_read_are_handed_over_at_once() -> None:
    answer, _ = fed(OK + b"transfer-encoding: chunked\r\n\r\n")
    got: list[bytes] = []
    reading = asyncio.ensure_future(answer.content.pass_to(lambda data: not got.append(data)))  # type: ignore[func-returns-value]
    await asyncio.sleep(0)
    answer.received(b"3\r\none\r\n3\r\ntwo\r\n")
    answer.received(b"5\r\nthree\r\n0\r\n\r\n")
    assert await reading
    assert got == [b"onetwo", b"three"]


async def test_only_a_read_that_begins_where_a_chunk_does_may_pass_by() -> None:
    """Bodies that look like the framing, cut in three at every two bytes."""
    chunks = [
        b"3\r\none\r\n",
        b"8\r\n\r\n3\r\nab\n\r\n",
        b"3;x=y\r\ntwo\r\n",
        b"10\r\n" + b"3\r\nxyz\r\n" * 2 + b"\r\n",
    ]
    body = b"".join(chunks)
    starts = set(accumulate(map(len, chunks)))
    for first in range(1, len(body)):
        for second in range(first + 1, len(body)):
            answer, _ = fed(OK + b"transfer-encoding: chunked\r\n\r\n")
            asked: list[int] = []
            at = 0

            def pass_by(read: bytes, asked: list[int] = asked) -> bool:
                asked.append(at)  # noqa: B023 - where it begins
                return False

            reading = asyncio.ensure_future(answer.content.pass_to(lambda data: True, pass_by))
            await asyncio.sleep(0)
            for begin, end in pairwise((0, first, second, len(body))):
                at = begin
                assert answer.received(body[begin:end])
            assert starts.issuperset(asked), (first, second)
            assert first not in starts or first in asked
            reading.cancel()
