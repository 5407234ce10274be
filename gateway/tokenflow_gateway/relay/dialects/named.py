"""Follows a stream of named events, as ``/v1/messages`` and ``/v1/responses`` have them.

Each event is one JSON object whose `type` repeats the event's name. No usage comes before the end, so tokens
are counted one for each delta until then; the engine's own count of the whole answer replaces that sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.dialects.base import Document
from tokenflow_gateway.relay.meter import Piece
from tokenflow_gateway.relay.sse import Event, SSEReader
from tokenflow_gateway.relay.usage import Usage

__all__ = ["NamedEventMeter", "TokenUsage", "read_document"]


class TokenUsage(msgspec.Struct, frozen=True):
    """`usage` with the names that both APIs give its fields."""

    input_tokens: float | None = None
    output_tokens: float | None = None
    cache_read_input_tokens: float | None = None
    """Anthropic's: of the prompt, and not among `input_tokens`."""
    cache_creation_input_tokens: float | None = None

    def merged(self, before: Usage | None) -> Usage:
        """The counts beside those known `before`: Anthropic's come in two events."""
        prompt = [self.input_tokens, self.cache_read_input_tokens, self.cache_creation_input_tokens]
        known = before or Usage()
        return Usage(
            prompt_tokens=known.prompt_tokens
            if self.input_tokens is None
            else sum(part or 0 for part in prompt),
            completion_tokens=known.completion_tokens if self.output_tokens is None else self.output_tokens,
        )


class _Document(msgspec.Struct):
    id: str | None = None
    status: str | None = None
    usage: TokenUsage | None = None


_decode_document = msgspec.json.Decoder(_Document).decode


def read_document(body: bytes) -> Document:
    """What both APIs have in the same place of a whole answer; a `status` only responses have."""
    try:
        read = _decode_document(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Document()
    usage = None if read.usage is None else read.usage.merged(None)
    return Document(usage, response_id=read.id, status=read.status)


class _Type(msgspec.Struct):
    type: str = ""
    error: Any = None


_decode_type = msgspec.json.Decoder(_Type).decode


class NamedEventMeter(ABC):
    """Counts tokens and notices the end; every event leaves as the bytes it came in.

    Removed are comments, and whatever follows the end. Rewritten is an error that has no name, which clients
    of these APIs would skip (`_unnamed_error`).
    """

    def __init__(self, track: ReaderTrack, *, max_event_bytes: int) -> None:
        self._track = track
        self._reader = SSEReader(max_event_bytes=max_event_bytes)
        self._ended = False
        self.tokens = 0
        """Tokens of the answer that have come so far."""
        self.usage: Usage | None = None
        self.settled = False
        """`tokens` is the engine's own count of the whole answer."""
        self.done = False
        """The last event has been passed on: nothing may follow."""
        self.failed = False
        """The engine reported an error inside the stream."""
        self.error: bytes | None = None
        self.aborted = False
        self.sequence = 0
        self.events = 0
        """Events with data that have come."""

    @property
    def readable(self) -> int:
        """Those of `tokens` that the reader will see."""
        return self._track.shape.tokens

    @property
    def complete(self) -> bool:
        """The engine has said why the answer ended."""
        return self.done

    @property
    def ending(self) -> bytes:
        return b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine; returns those for the client now. Raises `sse.SSEError`."""
        return b"".join(self._kept(self._reader.feed(data)))

    def pieces(self, data: bytes) -> list[Piece]:
        """The same, event by event, each with the tokens that the client has with it."""
        return [Piece(raw, self.tokens, self.readable) for raw in self._kept(self._reader.feed(data))]

    def end(self) -> bytes:
        """The engine's stream is over; returns what was still held back, if it is whole."""
        self._ended = True
        return b"".join(self._kept(self._reader.end()))

    # ---- for dialects ----------------------------------------------------------------------------

    @abstractmethod
    def _note(self, data: bytes) -> None:
        """Take in one event. Raises `msgspec.ValidationError` for one of another shape than expected."""

    @abstractmethod
    def _note_type(self, kind: str) -> None:
        """Take in an event of which only the type can be read."""

    @abstractmethod
    def _unnamed_error(self, data: bytes) -> bytes:
        """An error event without a type as one that clients notice."""

    def _text(self, text: str) -> None:
        """A delta with text for the reader."""
        self.tokens += 1
        self._track.content(text)

    def _hidden(self) -> None:
        """A delta that nobody reads: reasoning, a tool call's arguments."""
        self.tokens += 1
        self._track.hidden()

    def _settle(self, usage: TokenUsage) -> None:
        """The engine's own count of the whole answer."""
        self.usage = usage.merged(self.usage)
        if usage.output_tokens is not None:
            self.tokens, self.settled = self.usage.completion, True

    # ---- inside ----------------------------------------------------------------------------------

    def _kept(self, events: Iterable[Event]) -> Iterator[bytes]:
        for event in events:
            if self.done:
                return
            raw = self._one(event)
            if raw is not None:
                yield raw

    def _one(self, event: Event) -> bytes | None:
        data = _data(event.raw) or event.data
        if not data.strip():
            return None
        self.events += 1
        try:
            self._note(data)
        except msgspec.ValidationError:
            return self._by_type(event.raw, data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None if self._ended else event.raw  # cut off, or nothing we know and not ours to judge
        return event.raw

    def _by_type(self, raw: bytes, data: bytes) -> bytes:
        try:
            head = _decode_type(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return raw
        if head.type:
            self._note_type(head.type)
            return raw
        if head.error in (None, False):
            return raw
        self.failed = True
        return self._unnamed_error(data)


def _data(raw: bytes) -> bytes:
    """The data of an event of two lines, name and data, as engines send it; empty for others."""
    if not (raw.startswith(b"event: ") and raw.endswith(b"\n\n") and raw.count(b"\n") == 3) or b"\r" in raw:
        return b""
    _, _, line = raw.partition(b"\n")
    return line[6:-2] if line.startswith(b"data: ") else b""
