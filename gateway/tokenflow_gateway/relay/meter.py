"""Follows one stream's events: what the client gets of them, how many tokens, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.errors import normalise_error_event
from tokenflow_gateway.relay.sse import Event, SSEReader, is_done

__all__ = ["ABORTED", "DONE", "StreamMeter", "Usage"]

DONE = b"data: [DONE]\n\n"
ABORTED = "abort"
"""SGLang's `finish_reason` of a request that somebody, or its scheduler, has ended."""


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's `usage`, as far as it is used."""

    prompt_tokens: float | None = 0
    completion_tokens: float | None = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None

    def is_hidden(self) -> bool:
        """Whether it carries tokens that no reader sees."""
        return bool(self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamMeter:
    """Turns the engine's bytes into the client's, event by event and unchanged but for what must differ.

    Removed: comments and other events without data, and the usage event where the client did not ask for
    it. Rewritten: an error that is not in OpenAI's shape. Everything else leaves as the bytes it came in.
    """

    def __init__(self, reader: ReaderTrack, *, max_event_bytes: int, keep_usage: bool) -> None:
        self._track = reader
        self._reader = SSEReader(max_event_bytes=max_event_bytes)
        self._keep_usage = keep_usage
        self._open_choices: set[int] = set()
        self._finished_choices = 0
        self._ended = False
        self.tokens = 0
        """Events that carried content: the count of tokens until `usage` is known."""
        self.usage: Usage | None = None
        self.done = False
        """``[DONE]`` has been passed on: nothing may follow."""
        self.failed = False
        """The engine reported an error inside the stream."""
        self.aborted = False
        """The engine gave the request up; what it says after that is not passed on."""

    @property
    def complete(self) -> bool:
        """Every choice that was begun has its `finish_reason`."""
        return self._finished_choices > 0 and not self._open_choices

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine; returns those for the client now. Raises `sse.SSEError`."""
        return self._pass(self._reader.feed(data))

    def end(self) -> bytes:
        """The engine's stream is over; returns what was still held back, if it is whole."""
        self._ended = True
        return self._pass(self._reader.end())

    def _pass(self, events: Iterable[Event]) -> bytes:
        kept = []
        for event in events:
            if self.done or self.aborted:
                break
            raw = self._one(event)
            if raw is not None:
                kept.append(raw)
        return kept[0] if len(kept) == 1 else b"".join(kept)

    def _one(self, event: Event) -> bytes | None:
        if not event.has_data:
            return None
        if is_done(event):
            self.done = True
            return event.raw
        try:
            chunk = _decode(event.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None if self._ended else event.raw  # cut off, or nothing we know and not ours to judge
        if chunk.error is not None or chunk.object == "error":
            self.failed = True
            flat = normalise_error_event(event.data)
            return event.raw if flat is None else b"data: " + flat + b"\n\n"
        return self._count(event, chunk)

    def _count(self, event: Event, chunk: _Chunk) -> bytes | None:
        if chunk.usage is not None:
            self.usage = chunk.usage
            if not chunk.choices and not self._keep_usage:
                return None
        for choice in chunk.choices or ():
            self._follow(choice)
        return None if self.aborted else event.raw

    def _follow(self, choice: _Choice) -> None:
        text = choice.text or (choice.delta and (choice.delta.content or choice.delta.refusal))
        if text:
            self.tokens += 1
            self._track.content(text)
        elif choice.delta is not None and choice.delta.is_hidden():
            self.tokens += 1
            self._track.hidden()
        if choice.finish_reason is None:
            self._open_choices.add(choice.index)
        else:
            self.aborted |= choice.finish_reason == ABORTED
            self._open_choices.discard(choice.index)
            self._finished_choices += 1
