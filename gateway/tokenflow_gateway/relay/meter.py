"""Follows one stream's events: what the client gets of them, how many tokens, and how it ended.

Tokens are counted by the usage that each chunk carries where the engine was asked for it (SGLang's
``continuous_usage_stats``), else one for each event with content. SGLang (0.5.23, serving_chat.py and
serving_completions.py) gives the totals of the chunk's choice, exact also for n > 1 and for reasoning. Three
kinds of chunk lack it, and add nothing: the first, with the role; the last, with `finish_reason`; the rest
of a tool call that its parser had held back. What the final usage has beyond the sum, such as the token that
ends the text, nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.chunk_shape import MOST_EVENT_BYTES, ChunkShape
from tokenflow_gateway.relay.errors import normalise_error_event
from tokenflow_gateway.relay.sse import Event, SSEReader, is_done
from tokenflow_gateway.relay.usage import Usage, without_usage

__all__ = ["ABORTED", "DONE", "Piece", "StreamMeter"]

_MOST_TRIES = 16
"""After so many chunks that have no shape none is looked for: with logprobs none ever has."""
DONE = b"data: [DONE]\n\n"
ABORTED = "abort"
"""SGLang's `finish_reason` of a request that somebody, or its scheduler, has ended."""


class _Delta(msgspec.Struct):
    role: str | msgspec.UnsetType | None = msgspec.UNSET
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

    @property
    def leaves_null(self) -> bool:
        """Whether SGLang writes ``"usage":null`` into such a chunk where no usage was asked for.

        It does where its own models make the JSON: completions, and chat chunks with tools. All the other
        chunks come from its sse_utils.py, which leaves out what is null; of those with usage none has a role.
        """
        delta = self.choices[0].delta if self.choices else None
        return delta is None or delta.role is not msgspec.UNSET


_decode = msgspec.json.Decoder(_Chunk).decode


class Piece(NamedTuple):
    """Bytes for the client, and how many tokens of the answer it has with them: all, and those to be read."""

    data: bytes
    tokens: int
    readable: int


class StreamMeter:
    """Turns the engine's bytes into the client's, event by event and unchanged but for what must differ.

    Removed: comments, events with no data or an empty one, and the usage where the client did not ask for it:
    the event at the end, and what chunks carry because the gateway asked (`cut_usage`). Rewritten: an event
    that is more than one line of data (`Event.plain`), an error that is not in OpenAI's shape. Everything
    else leaves as the bytes it came in.
    """

    def __init__(
        self, reader: ReaderTrack, *, max_event_bytes: int, keep_usage: bool, cut_usage: bool = False
    ) -> None:
        self._track = reader
        self._reader = SSEReader(max_event_bytes=max_event_bytes)
        self._keep_usage = keep_usage
        self._cut_usage = cut_usage
        self._exact: bool | None = None  # each chunk with content carries its usage; None before the first
        self._counts: dict[int, int] = {}  # completion tokens by choice, where that is so
        self._open_choices: set[int] = set()
        self._finished_choices = 0
        self._ended = False
        self._tries = _MOST_TRIES if max_event_bytes >= MOST_EVENT_BYTES else 0  # left to find a shape
        self.shape: ChunkShape | None = None
        """What fits it need not come here, but to `texts`, while `between_events` and before any end."""
        self.events = 0
        """Events with data that have come so far."""
        self.tokens = 0
        """Tokens of the answer that have come so far."""
        self.usage: Usage | None = None
        """The last that was decoded."""
        self.settled = False
        """`tokens` is the engine's own count of the whole answer."""
        self.done = False
        """``[DONE]`` has been passed on: nothing may follow."""
        self.failed = False
        """The engine reported an error inside the stream, which is the end of it."""
        self.error: bytes | None = None
        """That error, in OpenAI's shape."""
        self.aborted = False
        """The engine gave the request up; what it says after that is not passed on."""
        self.sequence = 0
        self.ending = DONE
        """What the stream lacks if it ends without."""

    @property
    def readable(self) -> int:
        """Those of `tokens` that the reader will see."""
        return self._track.shape.tokens

    @property
    def complete(self) -> bool:
        """Every choice that was begun has its `finish_reason`."""
        return self._finished_choices > 0 and not self._open_choices

    @property
    def between_events(self) -> bool:
        """What comes next begins an event."""
        return self._reader.between_events

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine; returns those for the client now. Raises `sse.SSEError`."""
        events = self._reader.feed(data)
        if len(events) == 1 and not self.done and not self.aborted:
            return self._one(events[0]) or b""
        return b"".join(self._kept(events))

    def pieces(self, data: bytes) -> list[Piece]:
        """The same, event by event, each with the tokens that the client has with it."""
        events = self._reader.feed(data)
        return [Piece(raw, self.tokens, self.readable) for raw in self._kept(events)]

    def end(self) -> bytes:
        """The engine's stream is over; returns what was still held back, if it is whole."""
        self._ended = True
        return b"".join(self._kept(self._reader.end()))

    def _kept(self, events: Iterable[Event]) -> Iterator[bytes]:
        for event in events:
            if self.done or self.aborted:
                return
            raw = self._one(event)
            if raw is not None:
                yield raw

    def _one(self, event: Event) -> bytes | None:
        if is_done(event):
            self.done = True
            return DONE
        if event.is_plain:
            data = event.raw[6:-2]
        else:
            event = event.plain()
            data = event.data
        if not data.strip():
            return None
        self.events += 1
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None if self._ended else event.raw  # cut off, or nothing we know and not ours to judge
        if chunk.error not in (None, False) or chunk.object == "error":
            self.failed = self.done = True
            flat = normalise_error_event(data)
            self.error = data if flat is None else flat
            return (event.raw if flat is None else b"data: " + flat + b"\n\n") + DONE
        return self._count(event, chunk)

    def _count(self, event: Event, chunk: _Chunk) -> bytes | None:
        if not chunk.choices:
            if chunk.usage is not None:
                self._settle(chunk.usage)
                if not self._keep_usage:
                    return None
            return event.raw
        for choice in chunk.choices:
            self._follow(choice, chunk.usage)
        if self.aborted:
            return None
        if self.shape is None and self._tries:
            self._learn_shape(event, chunk)
        if chunk.usage is None:
            return event.raw
        if self._exact:
            self.usage = chunk.usage
        else:
            self._settle(chunk.usage)  # of an engine that puts it into the last chunk
        return without_usage(event, leaves_null=chunk.leaves_null) if self._cut_usage else event.raw

    def _learn_shape(self, event: Event, chunk: _Chunk) -> None:
        """Take this chunk as the pattern of those to come, if it is nothing but a piece of one text."""
        choice = chunk.choices[0] if chunk.choices else None
        if choice is None or len(chunk.choices or ()) > 1 or choice.index or choice.finish_reason is not None:
            return
        delta = choice.delta
        text = choice.text if delta is None else delta.content
        if not text or (delta is not None and (delta.is_hidden() or delta.refusal or choice.text)):
            return
        if self._exact is (chunk.usage is not None):
            self._tries -= 1
            self.shape = ChunkShape.of(
                event.raw, text, chunk.usage, cut_usage=self._cut_usage, leaves_null=chunk.leaves_null
            )

    def texts(self, texts: Sequence[str], totals: Sequence[int]) -> list[int]:
        """Count events of the known shape that have gone by, as `feed` would have; `readable` with each.

        `totals`: the tokens of the answer so far, by the usage of each.
        """
        self.events += len(texts)
        self._open_choices.add(0)
        tokens = [1] * len(texts)
        if self._exact:
            before = self._counts.get(0, 0)
            for at, total in enumerate(totals):
                tokens[at] = total - before if total > before else 0
                before += tokens[at]
            self._counts[0] = before
        self.tokens += sum(tokens)
        return self._track.contents(texts, tokens)

    def _settle(self, usage: Usage) -> None:
        """The engine's own count of the whole answer."""
        self.usage, self.settled = usage, True
        total = usage.completion
        if self._exact and total > self.tokens:
            self._track.hidden(total - self.tokens)
        self.tokens = total

    def _follow(self, choice: _Choice, usage: Usage | None) -> None:
        text = choice.text or (choice.delta and (choice.delta.content or choice.delta.refusal))
        if text:
            tokens = 1 if self._exact is False else self._new_tokens(choice.index, usage)
            self.tokens += tokens
            self._track.content(text, tokens)
        elif choice.delta is not None and choice.delta.is_hidden():
            tokens = 1 if self._exact is False else self._new_tokens(choice.index, usage)
            self.tokens += tokens
            self._track.hidden(tokens)
        if choice.finish_reason is None:
            self._open_choices.add(choice.index)
        else:
            self.aborted |= choice.finish_reason == ABORTED
            self._open_choices.discard(choice.index)
            self._finished_choices += 1

    def _new_tokens(self, choice: int, usage: Usage | None) -> int:
        """Tokens of this choice that no event before has brought."""
        if usage is None:
            self._exact = self._exact or False
            return int(not self._exact)
        self._exact = True
        before, now = self._counts.get(choice, 0), usage.completion
        if now <= before:
            return 0
        self._counts[choice] = now
        return now - before
