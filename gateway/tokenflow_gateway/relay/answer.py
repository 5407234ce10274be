"""An engine's answer on its way to the client: a stream of events, or one document."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec

from tokenflow_gateway.relay.errors import BadStream, EngineAborted, StreamTruncated, normalise_error
from tokenflow_gateway.relay.exchange import STREAM_HEADER, STREAM_HEADERS, Exchange
from tokenflow_gateway.relay.guard import RequestGuard
from tokenflow_gateway.relay.meter import ABORTED, DONE, StreamMeter, Usage
from tokenflow_gateway.relay.sse import Event, SSEError, SSEReader
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.relay.upstream import Header

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
    meter: StreamMeter,
    *,
    handle: str,
    idle_s: float,
) -> None:
    """Relay a metered stream to its end. Raises `BadStream`, `StreamTruncated`, or what the guard raises.

    `handle` names the stream to the client, for progress reports. The answer is finished towards the client
    unless this raises.
    """
    await exchange.start(200, (*STREAM_HEADERS, (STREAM_HEADER, handle.encode())))
    data = await response.content.readany()  # until then it is still the first byte that is waited for
    guard.expect(idle_s, "nothing more")
    while data:
        await _hand_over(exchange, guard, stream, meter, _feed(meter, data))
        if meter.aborted:
            raise EngineAborted(_GIVEN_UP)
        guard.extend(idle_s)
        if meter.done:
            guard.expect(_TAIL_S, "no end of its stream")
        data = await response.content.readany()
    await _hand_over(exchange, guard, stream, meter, meter.end() + _closing(meter))
    await exchange.finish()


def _feed(meter: StreamMeter, data: bytes) -> bytes:
    try:
        return meter.feed(data)
    except SSEError as error:
        raise BadStream(f"the engine's stream cannot be read: {error}") from error


async def _hand_over(
    exchange: Exchange, guard: RequestGuard, stream: Stream, meter: StreamMeter, data: bytes
) -> None:
    if data:
        guard.hold()  # waiting for the client is not waiting for the engine
        await exchange.write(data)
    now = time.monotonic()
    if meter.tokens and stream.first_token is None:
        stream.first_token = now
    stream.delivered = meter.tokens
    stream.reader.delivered(now)
    if meter.usage is not None:
        note_usage(stream, meter.usage)


def _closing(meter: StreamMeter) -> bytes:
    """What the end of the engine's stream lacks. Raises `StreamTruncated` if that is more than a word."""
    if meter.done or meter.failed:
        return b"" if meter.done else DONE
    if meter.complete:
        return DONE
    raise StreamTruncated("the engine's stream ended before the answer was complete")


def note_usage(stream: Stream, usage: Usage) -> None:
    """The engine's own count: all of it has been, or is about to be, handed over."""
    stream.prompt_tokens = int(usage.prompt_tokens or 0)
    stream.usage_tokens = stream.delivered = int(usage.completion_tokens or 0)


async def relay_document(exchange: Exchange, response: aiohttp.ClientResponse, stream: Stream) -> None:
    """Relay a whole JSON answer, and count by its usage. Raises `EngineAborted`."""
    body = await response.read()
    document = _parse(body)
    if document.usage is not None:
        note_usage(stream, document.usage)
    if any(choice.finish_reason == ABORTED for choice in document.choices):
        raise EngineAborted(_GIVEN_UP)
    await exchange.answer(response.status, body)


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
