"""An engine's answer on its way to the client: a stream of events, or one document."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from tokenflow_gateway.readers.connection import ConnectionTrack
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.dialects import Dialect, Document, Meter
from tokenflow_gateway.relay.engine_answer import READ_BYTES, EngineAnswer
from tokenflow_gateway.relay.errors import (
    BadStream,
    EngineAborted,
    EngineFailed,
    EngineRefused,
    EngineUnreachable,
    IdleTimeout,
    StreamTruncated,
    normalise_error,
)
from tokenflow_gateway.relay.exchange import STREAM_HEADER, STREAM_HEADERS, Exchange
from tokenflow_gateway.relay.express import Express, note_usage
from tokenflow_gateway.relay.guard import RequestGuard
from tokenflow_gateway.relay.meter import Piece
from tokenflow_gateway.relay.sse import Event, SSEError, SSEReader
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.relay.upstream import Header

__all__ = [
    "EventHead",
    "is_event_stream",
    "note_document",
    "passed_headers",
    "relay_document",
    "relay_error",
    "relay_events",
    "relay_foreign_events",
    "relay_raw",
]

_MOST_REFUSAL_BYTES = 1024 * 1024
"""Of an engine's error answer; of a longer one its beginning is the message."""
_NO_CONTENT = 204
_TAIL_S = 1.0
"""How long the engine may take to close its side after ``[DONE]``, so that the connection can be reused."""
_PASSED = frozenset({b"content-type", b"content-disposition", b"retry-after"})

_GIVEN_UP = "the engine gave this request up before the answer was complete"


def is_event_stream(response: EngineAnswer) -> bool:
    """Whether a successful answer comes as server-sent events."""
    return response.status < 300 and response.content_type == "text/event-stream"


def passed_headers(response: EngineAnswer) -> list[Header]:
    """The engine's headers that are the client's business."""
    return [header for header in response.headers.items() if header[0] in _PASSED]


class EventHead:
    """The head of one event stream. It leaves with the first event: until then, a failure is a status."""

    def __init__(self, exchange: Exchange, stream: Stream, *, handle: str) -> None:
        """`handle` names the stream to the client, for its reports."""
        self._exchange = exchange
        self._stream = stream
        self._handle = handle
        self.sent = False

    async def send(self, *, with_all: bool = False) -> None:
        """Unless it has left already. `with_all`: the whole answer does in the next write, nobody is watched.

        In front of a stream it leaves alone: the larger a connection's first segment, the larger the steps in
        which the client's kernel shows what its application reads.
        """
        if self.sent:
            return
        self.sent = True
        exchange = self._exchange
        if not with_all:
            now = time.monotonic()
            self._stream.connection = ConnectionTrack.begin(exchange.meter, exchange.headers, now=now)
        await exchange.start_events(((STREAM_HEADER, self._handle.encode()),), with_next=with_all)


async def relay_events(
    head: EventHead,
    response: EngineAnswer,
    guard: RequestGuard,
    stream: Stream,
    delivery: Delivery,
    meter: Meter,
    *,
    idle_s: float,
) -> None:
    """Relay a metered stream until the client has all of it.

    Only events move the guard's deadline: an engine that sends comments is silent. Raises `BadStream`,
    `StreamTruncated`, `EngineAborted`, `ClientTooSlow`, or what the guard raises; text that came before may
    then wait in `delivery`.
    """
    content = response.content
    try:
        with Express(response, guard, stream, delivery, meter, idle_s=idle_s) as express:
            while data := await content.read(READ_BYTES):
                deadline, events = guard.hold(), meter.events  # to wait for the client is not to wait for it
                await _pass_on(head, stream, delivery, meter, response, data)
                while not (meter.done or meter.aborted):
                    if delivery.full:
                        await delivery.room()
                    if meter.events == events:
                        guard.resume(deadline)
                    else:
                        guard.expect(idle_s, IdleTimeout)
                    if delivery.paced or not head.sent:
                        break
                    express.go_on()
                    if await content.pass_to(express.take, express.pass_by):
                        break
                    guard.hold()
                    events = -1
                if meter.aborted:
                    raise EngineAborted(_GIVEN_UP)
                if meter.done:
                    break
    except SSEError as error:
        raise _unreadable(error) from error
    guard.hold()
    if not meter.done:
        await _put(head, delivery, meter, Piece(meter.end(), meter.tokens, meter.readable))
        _note_counts(stream, meter)
        await _put(head, delivery, meter, Piece(_closing(meter), meter.tokens, meter.readable))
    stream.answered = not meter.failed
    stream.engine.answered.add(stream.rid)
    await _read_tail(response)
    await delivery.finish()


async def _pass_on(
    head: EventHead, stream: Stream, delivery: Delivery, meter: Meter, response: EngineAnswer, data: bytes
) -> None:
    """Count what has come and give it to the client, or to its queue."""
    if not delivery.paced:
        ready = meter.feed(data)
        _note_counts(stream, meter)
        last = meter.done and response.complete
        await _put(head, delivery, meter, Piece(ready, meter.tokens, meter.readable), last=last)
        return
    pieces = meter.pieces(data)
    _note_counts(stream, meter)
    for piece in pieces:
        await _put(head, delivery, meter, piece)


def _unreadable(error: SSEError) -> BadStream:
    return BadStream(f"the engine's stream cannot be read: {error}")


async def _put(
    head: EventHead, delivery: Delivery, meter: Meter, piece: Piece, *, last: bool = False
) -> None:
    """Give it to the client, the head before the first. Raises `EngineFailed` if that first is an error."""
    if not head.sent and piece.data:
        if meter.error is not None and meter.events == 1:
            raise EngineFailed(meter.error)
        await head.send(with_all=last and len(piece.data) <= READ_BYTES and delivery.takes_now(piece.data))
    delivery.put(*piece, last=last)


def _note_counts(stream: Stream, meter: Meter) -> None:
    stream.received = meter.tokens
    note_usage(stream, meter)


async def _read_tail(response: EngineAnswer) -> None:
    """The end of the engine's answer, which is here in full: what goes wrong now changes nothing."""
    if response.complete and response.content.exhausted:
        return
    with contextlib.suppress(TimeoutError, EngineUnreachable):
        async with asyncio.timeout(_TAIL_S):
            while await response.content.readany():
                pass


def _closing(meter: Meter) -> bytes:
    """What the end of the engine's stream lacks. Raises `StreamTruncated` if that is more than a word."""
    if meter.done or meter.failed:
        return b"" if meter.done else meter.ending
    if meter.complete:
        return meter.ending
    raise StreamTruncated("the engine's stream ended before the answer was complete")


async def relay_document(
    exchange: Exchange,
    response: EngineAnswer,
    guard: RequestGuard,
    stream: Stream,
    dialect: Dialect,
    *,
    idle_s: float,
    max_bytes: int,
) -> Document:
    """Relay a whole JSON answer, count by its usage, and return what it says.

    Raises `EngineAborted` or `BadStream`.
    """
    body = await _beginning(response, guard, max_bytes, idle_s=idle_s)
    if len(body) > max_bytes:
        raise BadStream(f"the engine's answer is longer than {max_bytes} bytes (max_answer_bytes)")
    document = dialect.document(body)
    note_document(stream, document)
    if document.given_up:
        raise EngineAborted(_GIVEN_UP)
    if exchange.status is not None:
        raise BadStream("the engine answered with one document, not with the stream that was asked for")
    if response.status == _NO_CONTENT:
        await exchange.start(response.status, ())
        await exchange.finish()
    else:
        await exchange.answer(response.status, body)
    stream.delivered = stream.received
    return document


def note_document(stream: Stream, document: Document) -> None:
    """Count by the usage that it tells, if it does."""
    if document.usage is not None:
        stream.prompt_tokens = document.usage.prompt
        stream.usage_tokens = stream.received = document.usage.completion


async def relay_error(
    exchange: Exchange, response: EngineAnswer, guard: RequestGuard, dialect: Dialect, *, idle_s: float
) -> None:
    """Relay an engine's refusal, in the dialect's shape and with its own status.

    Raises `EngineRefused` where the client's answer has begun already.
    """
    refusal = await _beginning(response, guard, _MOST_REFUSAL_BYTES, idle_s=idle_s)
    refusal = refusal[:_MOST_REFUSAL_BYTES]
    if exchange.status is not None:
        raise EngineRefused(normalise_error(refusal, response.status), response.status)
    body = dialect.refusal(refusal, response.status)
    headers = [header for header in passed_headers(response) if header[0] == b"retry-after"]
    await exchange.answer(response.status, body, headers)


async def relay_raw(
    exchange: Exchange, response: EngineAnswer, guard: RequestGuard, *, idle_s: float
) -> None:
    """Relay a document that is not ours to read, as it comes."""
    headers = passed_headers(response)
    if response.content_length is not None and b"content-encoding" not in response.headers:
        headers.append((b"content-length", str(response.content_length).encode()))
    await exchange.start(response.status, headers)
    async for data in _reads(response, guard, idle_s=idle_s):
        await exchange.write(data)
    await exchange.finish()


async def relay_foreign_events(
    exchange: Exchange,
    response: EngineAnswer,
    guard: RequestGuard,
    *,
    idle_s: float,
    max_event_bytes: int,
) -> None:
    """Relay a stream that is not ours to read, whole events only. Raises `BadStream`.

    Only events with data move the guard's deadline.
    """
    await exchange.start(response.status, STREAM_HEADERS)
    reader = SSEReader(max_event_bytes=max_event_bytes)
    while data := await response.content.readany():
        deadline = guard.hold()
        events = _split(reader, data)
        await _pass_events(exchange, events)
        if any(event.has_data for event in events):
            guard.expect(idle_s, IdleTimeout)
        else:
            guard.resume(deadline)
    await _pass_events(exchange, reader.end())
    await exchange.finish()


def _split(reader: SSEReader, data: bytes) -> list[Event]:
    try:
        return reader.feed(data)
    except SSEError as error:
        raise _unreadable(error) from error


async def _pass_events(exchange: Exchange, events: list[Event]) -> None:
    if events:
        await exchange.write(b"".join(event.raw for event in events))


async def _beginning(response: EngineAnswer, guard: RequestGuard, most: int, *, idle_s: float) -> bytes:
    """The whole body, or more than `most` bytes of a longer one."""
    parts, size = [], 0
    while size <= most and (data := await response.content.readany()):
        guard.expect(idle_s, IdleTimeout)
        parts.append(data)
        size += len(data)
    guard.hold()
    return b"".join(parts)


async def _reads(response: EngineAnswer, guard: RequestGuard, *, idle_s: float) -> AsyncIterator[bytes]:
    """What the engine sends, with its deadline held while the caller hands it on."""
    data = await response.content.readany()
    while data:
        guard.hold()
        yield data
        guard.expect(idle_s, IdleTimeout)
        data = await response.content.readany()
