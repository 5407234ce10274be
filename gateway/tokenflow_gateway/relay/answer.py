"""An engine's answer on its way to the client: a stream of events, or one document."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec

from tokenflow_gateway.readers.connection import ConnectionTrack
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.errors import BadStream, EngineAborted, StreamTruncated, normalise_error
from tokenflow_gateway.relay.exchange import STREAM_HEADER, STREAM_HEADERS, Exchange
from tokenflow_gateway.relay.guard import RequestGuard
from tokenflow_gateway.relay.meter import ABORTED, DONE, StreamMeter
from tokenflow_gateway.relay.sse import Event, SSEError, SSEReader
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.relay.upstream import Header
from tokenflow_gateway.relay.usage import Usage

__all__ = [
    "is_event_stream",
    "passed_headers",
    "relay_document",
    "relay_error",
    "relay_events",
    "relay_foreign_events",
    "relay_raw",
]

_TAIL_S = 1.0
"""How long the engine may take to close its side after ``[DONE]``, so that the connection can be reused."""
_READ_BYTES = 8 * 1024
"""What is taken from the engine's connection at a time, and so by how much a queue can exceed its cap."""
_PASSED = frozenset({"content-type", "content-disposition", "retry-after"})
_LAST_EVENTS = {
    "/v1/messages": {b"message_stop", b"error"},
    "/v1/responses": {b"response.completed", b"response.failed", b"response.incomplete", b"error"},
}
"""The events of which one must end a stream, where the route's dialect has them."""


_GIVEN_UP = "the engine gave this request up before the answer was complete"


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Document(msgspec.Struct):
    usage: Usage | None = None
    choices: list[_Choice] = []


def is_event_stream(response: aiohttp.ClientResponse) -> bool:
    """Whether a successful answer comes as server-sent events."""
    return response.status < 300 and response.content_type == "text/event-stream"


def passed_headers(response: aiohttp.ClientResponse) -> list[Header]:
    """The engine's headers that are the client's business."""
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.headers.items()
        if name.lower() in _PASSED
    ]


async def relay_events(
    exchange: Exchange,
    response: aiohttp.ClientResponse,
    guard: RequestGuard,
    stream: Stream,
    delivery: Delivery,
    meter: StreamMeter,
    *,
    handle: str,
    idle_s: float,
) -> None:
    """Relay a metered stream until the client has all of it.

    Raises `BadStream`, `StreamTruncated`, `EngineAborted`, `ClientTooSlow`, or what the guard raises; text
    that came before may then wait in `delivery`. `handle` names the stream to the client, for its reports.
    """
    stream.connection = ConnectionTrack.begin(exchange.meter, exchange.headers, now=time.monotonic())
    await exchange.start(200, (*STREAM_HEADERS, (STREAM_HEADER, handle.encode())))
    data = await response.content.read(_READ_BYTES)
    guard.expect(idle_s, "nothing more")  # until now it was the first byte that was waited for
    while data:
        guard.hold()  # waiting for the client is not waiting for the engine
        await _pass_on(stream, delivery, meter, data)
        if meter.aborted:
            raise EngineAborted(_GIVEN_UP)
        if meter.done:
            break
        if delivery.full:
            await delivery.room()
        guard.extend(idle_s)
        data = await response.content.read(_READ_BYTES)
    guard.hold()
    if not meter.done:
        rest = meter.end()
        _note_counts(stream, meter)
        await delivery.put(rest, meter.tokens, meter.readable)
        await delivery.put(_closing(meter), meter.tokens, meter.readable)
    stream.answered = not meter.failed
    await _read_tail(response)
    await delivery.finish()


async def _pass_on(stream: Stream, delivery: Delivery, meter: StreamMeter, data: bytes) -> None:
    """Count what has come and give it to the client, or to its queue."""
    try:
        if delivery.paced:
            for piece in meter.pieces(data):
                await delivery.put(*piece)
            ready = b""
        else:
            ready = meter.feed(data)
    except SSEError as error:
        raise BadStream(f"the engine's stream cannot be read: {error}") from error
    _note_counts(stream, meter)
    await delivery.put(ready, meter.tokens, meter.readable)


def _note_counts(stream: Stream, meter: StreamMeter) -> None:
    stream.received = meter.tokens
    if meter.usage is not None:
        stream.prompt_tokens = int(meter.usage.prompt_tokens or 0)
        if meter.settled:
            stream.usage_tokens = meter.tokens


async def _read_tail(response: aiohttp.ClientResponse) -> None:
    """The end of the engine's answer, which is here in full: what goes wrong now changes nothing."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
        async with asyncio.timeout(_TAIL_S):
            while await response.content.readany():
                pass


def _closing(meter: StreamMeter) -> bytes:
    """What the end of the engine's stream lacks. Raises `StreamTruncated` if that is more than a word."""
    if meter.done or meter.failed:
        return b"" if meter.done else DONE
    if meter.complete:
        return DONE
    raise StreamTruncated("the engine's stream ended before the answer was complete")


async def relay_document(exchange: Exchange, response: aiohttp.ClientResponse, stream: Stream) -> None:
    """Relay a whole JSON answer, and count by its usage. Raises `EngineAborted`."""
    body = await response.read()
    document = _parse(body)
    if document.usage is not None:
        stream.prompt_tokens = int(document.usage.prompt_tokens or 0)
        stream.usage_tokens = stream.received = document.usage.completion
    if any(choice.finish_reason == ABORTED for choice in document.choices):
        raise EngineAborted(_GIVEN_UP)
    await exchange.answer(response.status, body)
    stream.delivered = stream.received


def _parse(body: bytes) -> _Document:
    try:
        return msgspec.json.decode(body, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Document()


async def relay_error(exchange: Exchange, response: aiohttp.ClientResponse) -> None:
    """Relay an engine's refusal, in OpenAI's shape and with its own status."""
    body = normalise_error(await response.read(), response.status)
    headers = [header for header in passed_headers(response) if header[0] == b"retry-after"]
    await exchange.answer(response.status, body, headers)


async def relay_raw(
    exchange: Exchange, response: aiohttp.ClientResponse, guard: RequestGuard, *, idle_s: float
) -> None:
    """Relay a document that is not ours to read, as it comes."""
    headers = passed_headers(response)
    if response.content_length is not None and "Content-Encoding" not in response.headers:
        headers.append((b"content-length", str(response.content_length).encode()))
    await exchange.start(response.status, headers)
    async for data in _reads(response, guard, idle_s=idle_s):
        await exchange.write(data)
    await exchange.finish()


async def relay_foreign_events(
    exchange: Exchange,
    response: aiohttp.ClientResponse,
    guard: RequestGuard,
    *,
    idle_s: float,
    max_event_bytes: int,
) -> None:
    """Relay a stream in another dialect, whole events only. Raises `BadStream` or `StreamTruncated`."""
    await exchange.start(response.status, STREAM_HEADERS)
    reader, last = SSEReader(max_event_bytes=max_event_bytes), b""
    async for data in _reads(response, guard, idle_s=idle_s):
        last = await _pass_events(exchange, _split(reader, data)) or last
    last = await _pass_events(exchange, reader.end()) or last
    if last not in _LAST_EVENTS.get(exchange.path, {last}):
        raise StreamTruncated("the engine's stream ended before the answer was complete")
    await exchange.finish()


def _split(reader: SSEReader, data: bytes) -> list[Event]:
    try:
        return reader.feed(data)
    except SSEError as error:
        raise BadStream(f"the engine's stream cannot be read: {error}") from error


async def _pass_events(exchange: Exchange, events: list[Event]) -> bytes | None:
    """Hand events over; the name of the last one."""
    if not events:
        return None
    await exchange.write(b"".join(event.raw for event in events))
    return events[-1].event


async def _reads(
    response: aiohttp.ClientResponse, guard: RequestGuard, *, idle_s: float
) -> AsyncIterator[bytes]:
    """What the engine sends, with its deadline held while the caller hands it on."""
    data = await response.content.readany()
    guard.expect(idle_s, "nothing more")
    while data:
        guard.hold()
        yield data
        guard.extend(idle_s)
        data = await response.content.readany()
