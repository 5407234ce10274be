"""Chunks that go by: the bytes and counts are those of the ordinary way, wherever the engine's are cut."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.transcripts import load
from tokenflow_engine.buffer import VirtualBuffer
from tokenflow_gateway.config import DeliverySettings, EngineConfig
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.answer import EventHead, relay_events
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.engine_answer import EngineAnswer
from tokenflow_gateway.relay.errors import EngineUnreachable, IdleTimeout, RelayError
from tokenflow_gateway.relay.exchange import Exchange
from tokenflow_gateway.relay.express import Express
from tokenflow_gateway.relay.guard import RequestGuard
from tokenflow_gateway.relay.meter import StreamMeter
from tokenflow_gateway.relay.stream import Stream

MOST_GO_BY = ("chat_stream_length", "chat_stream_usage_continuous", "completions_stream")
RECORDED = (
    *MOST_GO_BY,
    "chat_stream",
    "chat_stream_emoji_continuous",
    "chat_stream_interval_continuous",
    "chat_stream_logprobs",
    "chat_stream_n2_continuous",
    "chat_stream_reasoning_continuous",
    "chat_stream_scripts",
    "chat_stream_tools_continuous",
    "completions_stream_continuous",
)
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def reads_of(name: str) -> list[bytes]:
    """A recording's events, each an HTTP chunk and a read of its own."""
    events = re.findall(rb".+?\n\n", b"".join(read.data for read in load(name).reads), re.DOTALL)
    return [framed(event) for event in events]


class Client:
    """Stands in for `Exchange`, and for the client's transport: what it `got` is in HTTP chunks."""

    def __init__(self, *, framed: bool) -> None:
        self.transport = self if framed else None
        self.got = b""
        self.gone_by = 0
        self.room = asyncio.Event()
        self.room.set()
        self.closing = False
        self.lost = False

    @property
    def writable(self) -> bool:
        return self.room.is_set()

    def get_write_buffer_size(self) -> int:
        return 0 if self.room.is_set() else 1

    def is_closing(self) -> bool:
        return self.closing

    def write_now(self, data: bytes) -> None:
        assert self.writable
        self.got += framed(data)

    def finish_now(self, data: bytes) -> bool:
        return False

    async def finish(self) -> None:
        """The end of the answer."""

    def write(self, data: bytes) -> Any:
        """Of the transport, a chunk; of the exchange, what waits until there is room."""
        if not re.match(rb"[0-9a-f]+\r\n", data):
            return self._write_later(data)
        assert self.writable
        assert not self.closing
        self.got += data
        self.gone_by += 1
        return None

    async def _write_later(self, data: bytes) -> None:
        await self.room.wait()
        self.write_now(data)

    @property
    def body(self) -> bytes:
        """Without the framing, which has to be right."""
        rest, body = self.got, b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            assert rest[int(size, 16) :].startswith(b"\r\n")
            rest = rest[int(size, 16) + 2 :]
        return body


class Relayed:
    """One stream on its way from the reads that a test has come to a client."""

    def __init__(self, *, goes_by: bool, cut_usage: bool, idle_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.client = Client(framed=goes_by)
        self.track = ReaderTrack(reader="human", declared_rate=None, now=loop.time())
        self.stream = Stream(
            rid="r",
            request_id="q",
            route="/v1/chat/completions",
            model="m",
            engine=Engine(EngineConfig(url="http://127.0.0.1:1")),
            reader=self.track,
            engine_copy=VirtualBuffer(rate=5.0, now=0.0),
        )
        self.meter = StreamMeter(
            self.track, max_event_bytes=1 << 20, keep_usage=not cut_usage, cut_usage=cut_usage
        )
        engine = SimpleNamespace(
            is_closing=lambda: False, pause_reading=lambda: None, resume_reading=lambda: None
        )
        self.answer = EngineAnswer(loop, cast(asyncio.Transport, engine), to_head=False)
        self.task = loop.create_task(self._relay(idle_s))

    async def _relay(self, idle_s: float) -> None:
        await self.answer.head()
        exchange = cast(Exchange, self.client)
        head = EventHead(exchange, self.stream, handle="")
        head.sent = True
        connection = cast(Any, SimpleNamespace(watch=lambda on_lost: None))
        async with (
            RequestGuard(cast(Any, None), connection=connection) as guard,
            Delivery(exchange, self.stream, DeliverySettings()) as delivery,
        ):
            await relay_events(head, self.answer, guard, self.stream, delivery, self.meter, idle_s=idle_s)

    async def come(self, reads: Iterable[bytes]) -> None:
        """Each, and then time for the stream's task."""
        for read in reads:
            self.answer.received(read)
            for _ in range(3):
                await asyncio.sleep(0)


@asynccontextmanager
async def relayed(
    *, goes_by: bool = True, cut_usage: bool = True, idle_s: float = 60.0
) -> AsyncIterator[Relayed]:
    made = Relayed(goes_by=goes_by, cut_usage=cut_usage, idle_s=idle_s)
    try:
        yield made
    finally:
        made.task.cancel()
        await asyncio.wait((made.task,))


class Outcome(NamedTuple):
    body: bytes
    received: int
    delivered: int
    readable: int
    prompt: int | None
    usage: int | None
    events: int
    complete: bool
    chars_until: list[int]
    shape: tuple[int, ...]
    whole: bool
    failed: bool


async def outcome(reads: list[bytes], *, goes_by: bool = True, cut_usage: bool = True) -> tuple[Outcome, int]:
    """All that is made of these reads, and how many chunks have gone by."""
    async with relayed(goes_by=goes_by, cut_usage=cut_usage) as made:
        await made.come([ANSWER, *reads, END])
        (failure,) = await asyncio.gather(made.task, return_exceptions=True)
        assert failure is None or isinstance(failure, RelayError)
        stream, track = made.stream, made.track
        seen = Outcome(
            body=made.client.body,
            received=stream.received,
            delivered=stream.delivered,
            readable=track.handed_over,
            prompt=stream.prompt_tokens,
            usage=stream.usage_tokens,
            events=made.meter.events,
            complete=made.meter.complete,
            chars_until=list(track._chars_until),
            shape=(track.shape.chars, track.shape.wide_chars, track.shape.code_chars),
            whole=made.answer.complete,
            failed=failure is not None,
        )
        return seen, made.client.gone_by


@pytest.mark.parametrize("cut_usage", [False, True])
@pytest.mark.parametrize("name", RECORDED)
async def test_recordings_that_go_by_are_the_same_and_count_the_same(name: str, cut_usage: bool) -> None:
    reads = reads_of(name)
    seen, gone_by = await outcome(reads, cut_usage=cut_usage)
    ordinary, none = await outcome(reads, goes_by=False, cut_usage=cut_usage)
    assert seen == ordinary
    assert none == 0
    assert gone_by > len(reads) / 2 or name not in MOST_GO_BY


async def test_wherever_two_reads_meet() -> None:
    """Two chunks in the middle, as one read and in two that meet at every byte of them."""
    reads = reads_of("chat_stream_usage_continuous")
    reads = reads[:8] + reads[-3:]
    ordinary, _ = await outcome(reads, goes_by=False)
    _, whole = await outcome(reads)
    pair = reads[4] + reads[5]
    for at in range(len(pair)):
        seen, gone_by = await outcome([*reads[:4], *filter(None, (pair[:at], pair[at:])), *reads[6:]])
        assert seen == ordinary, at
        assert gone_by == whole if at == len(reads[4]) else 0 < gone_by < whole, at


def looks_alike(event: bytes) -> dict[str, list[bytes]]:
    """Reads of which one is, to the byte, an HTTP chunk with an event that fits, and means something else."""
    inner = framed(event)
    head = b"%x\r\n" % len(inner)
    size = int(b"1" + inner.split(b"\r\n")[0], 16)
    filler = b"\n\n" + b":" * (size - len(event) - 6) + b"\n\n"
    return {
        "within a chunk": [head, inner, b"\r\n"],
        "within a chunk whose head came with the one before": [framed(event) + head, inner, b"\r\n"],
        "behind the first digit of a size": [framed(event) + b"1", inner, filler + b"\r\n"],
        "within an event": [framed(b"data:\n"), inner],
        "within a chunk that has begun": [head + inner[:9], inner[9:], b"\r\n", inner],
    }


@pytest.mark.parametrize("case", looks_alike(b""))
async def test_what_only_looks_like_a_chunk_does_not_go_by(case: str) -> None:
    reads = reads_of("chat_stream_length")
    reads[5:6] = looks_alike(reads[5].split(b"\r\n")[1])[case]
    ordinary, _ = await outcome(reads, goes_by=False)
    seen, gone_by = await outcome(reads)
    assert seen == ordinary
    assert gone_by >= 3  # before it


async def test_what_has_gone_by_is_counted_when_the_engine_is_lost() -> None:
    reads = reads_of("chat_stream_usage_continuous")[:7]
    counts = []
    for goes_by in (False, True):
        async with relayed(goes_by=goes_by) as made:
            await made.come([ANSWER, *reads])
            made.answer.lost()
            with pytest.raises(EngineUnreachable):
                await made.task
            counts.append((made.stream.received, made.stream.delivered, made.track.handed_over))
            assert bool(made.client.gone_by) == goes_by
    assert counts[0] == counts[1]


async def test_control_what_has_gone_by_is_not_counted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = reads_of("chat_stream_usage_continuous")
    ordinary, _ = await outcome(reads, goes_by=False)
    monkeypatch.setattr(Express, "_settle", lambda self: None)
    seen, _ = await outcome(reads)
    assert seen.body == ordinary.body
    assert seen.events < ordinary.events
    assert seen.readable < ordinary.readable


async def test_what_has_gone_by_is_counted_once_somebody_looks() -> None:
    reads = reads_of("chat_stream_usage_continuous")
    async with relayed() as made:
        await made.come([ANSWER, *reads[:7]])
        before = made.stream.delivered
        assert made.client.gone_by > 3
        assert cast(int, made.stream.view(asyncio.get_running_loop().time())["delivered"]) > before
        counted = made.stream.received, made.stream.delivered, made.track.handed_over
        made.stream.settle()
        assert counted == (made.stream.received, made.stream.delivered, made.track.handed_over)


async def test_much_that_goes_by_is_counted_without_a_look() -> None:
    chunk = reads_of("chat_stream_length")[3]
    async with relayed() as made:
        await made.come([ANSWER, chunk])
        for _ in range(100):
            made.answer.received(chunk)
        assert made.meter.events > 60


async def test_order_is_kept_when_the_client_takes_nothing_for_a_while() -> None:
    reads = reads_of("chat_stream_length")
    ordinary, _ = await outcome(reads, goes_by=False)
    async with relayed() as made:
        await made.come([ANSWER, *reads[:5]])
        made.client.room.clear()
        await made.come(reads[5:8])
        gone_by, got = made.client.gone_by, made.client.got
        made.client.room.set()
        made.answer.received(reads[8])  # before what waits
        assert made.client.got == got
        await made.come([*reads[9:], END])
        await made.task
        assert made.client.body == ordinary.body
        assert made.stream.delivered == ordinary.delivered
        assert made.client.gone_by > gone_by


async def test_nothing_overtakes_what_is_held_once_the_task_is_to_end() -> None:
    """Reads may come between its cancellation and its turn: parts of a chunk, and one that would fit."""
    reads = reads_of("chat_stream_usage_continuous")
    async with relayed() as made:
        await made.come([ANSWER, *reads[:5]])
        made.task.cancel()
        gone_by = made.client.gone_by
        for read in (reads[5][:50], reads[5][50:], reads[6]):
            made.answer.received(read)
        assert made.client.gone_by == gone_by


async def test_nothing_is_written_to_a_connection_that_closes() -> None:
    reads = reads_of("chat_stream_usage_continuous")
    async with relayed() as made:
        await made.come([ANSWER, *reads[:5]])
        made.client.closing = True
        gone_by = made.client.gone_by
        await made.come(reads[5:6])
        assert made.client.gone_by == gone_by


async def test_chunks_that_go_by_move_the_deadline_and_silence_does_not() -> None:
    chunk = reads_of("chat_stream_length")[3]
    loop = asyncio.get_running_loop()
    async with relayed(idle_s=0.3) as made:
        await made.come([ANSWER, chunk])
        for _ in range(8):
            await asyncio.sleep(0.1)
            made.answer.received(chunk)
            assert not made.task.done()
        assert made.client.gone_by == 8
        last = loop.time()
        with pytest.raises(IdleTimeout):
            await made.task
        assert 0.29 < loop.time() - last < 1.0


# ---- counting several at once ------------------------------------------------------------------------------

TEXTS = st.lists(st.tuples(st.text(max_size=6), st.integers(0, 3)), min_size=1, max_size=8)


def _tracks() -> tuple[ReaderTrack, ReaderTrack]:
    one, two = (ReaderTrack(reader="human", declared_rate=None, now=0.0) for _ in range(2))
    return one, two


def _all(track: ReaderTrack) -> list[object]:
    """Everything that text has left."""
    parts: list[Callable[[], object]] = [
        lambda: list(track._chars_until),
        lambda: track._events,
        lambda: None if track._tokens_until is None else list(track._tokens_until),
        lambda: [getattr(track.shape, name) for name in track.shape.__slots__],
    ]
    return [part() for part in parts]


@given(st.lists(TEXTS, max_size=4))
@example([[("a", 1), ("`", 1)], [("``x", 1)], [("y", 1), ("z", 1)], [("v", 1), ("```", 1), ("w", 1)]])
@example([[("a", 1)], [("b", 2)], [("c", 1), ("d", 1)]])
def test_text_that_is_counted_together_counts_as_one_by_one(batches: list[list[tuple[str, int]]]) -> None:
    together, single = _tracks()
    for batch in batches:
        readable = []
        for text, tokens in batch:
            single.content(text, tokens)
            readable.append(single.shape.tokens)
        assert together.contents([text for text, _ in batch], [tokens for _, tokens in batch]) == readable
        assert _all(together) == _all(single)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 3)), min_size=1, max_size=6), max_size=5),
    st.sampled_from(["human", "machine"]),
)
def test_what_is_handed_over_together_moves_the_reader_as_one_by_one(
    batches: list[list[tuple[int, float]]], reader: Any
) -> None:
    together, single = (ReaderTrack(reader=reader, declared_rate=8.0, now=0.0) for _ in range(2))
    total, now = 0, 0.0
    for batch in batches:
        totals, times = [], []
        for tokens, passed_s in batch:
            total, now = total + tokens, now + passed_s
            totals.append(total)
            times.append(now)
            single.delivered([total], [now])
        together.delivered(totals, times)
        for later_s in (0.0, 0.5):
            expected = single.estimate(now + later_s)
            assert together.estimate(now + later_s).consumed == pytest.approx(expected.consumed)
        now += 0.5
