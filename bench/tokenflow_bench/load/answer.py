"""One streamed answer as it comes over a connection of its own, into its log."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from tokenflow_bench.load.http import Exchange
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.reading import Reading
from tokenflow_gateway.relay.sse import SSEError, SSEReader, is_done

__all__ = ["Answer"]

_OK = 200
_MOST_ERROR_CHARS = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None

    def has_content(self) -> bool:
        """A token that a client could show, or use."""
        delta = self.delta
        if delta is not None:
            return bool(delta.content or delta.reasoning_content or delta.tool_calls)
        return bool(self.text)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Answer(Exchange):
    """Counts tokens by the usage in each event where there is any, by events with content elsewhere.

    `over` is set when nothing more will come. `reading` runs along; `capability` is what the gateway wants
    with progress reports.
    """

    def __init__(self, log: StreamLog, *, start_s: float) -> None:
        super().__init__()
        self.log = log
        self.reading = Reading(log.person)
        self.over = asyncio.Event()
        self.capability: str | None = None
        self.begun = asyncio.Event()
        """The first token has come, or none will."""
        self._start_s = start_s
        self._events = SSEReader()
        self._has_usage = False
        self._error_body = bytearray()

    def header(self, name: bytes, value: bytes) -> None:
        if name == b"x-tokenflow-stream":
            stream, _, capability = value.decode("latin-1").partition(".")
            self.log.stream, self.capability = stream, capability

    def body(self, data: bytes) -> None:
        if self.status != _OK:
            self._error_body += data[:_MOST_ERROR_CHARS]
            return
        now = time.monotonic() - self._start_s
        try:
            for event in self._events.feed(data):
                self._take(event.data, now, is_end=is_done(event))
        except (SSEError, msgspec.DecodeError) as error:
            self._end(f"not a stream of completions: {error}")

    def complete(self) -> None:
        if self.status != _OK:
            self._end(f"status {self.status}: {self._error_body.decode(errors='replace')}")
        elif not self.over.is_set():
            self._end("ended without [DONE]")

    def lost(self, why: str) -> None:
        if not self.over.is_set():
            self._end(why)

    def give_up(self) -> None:
        """The horizon has come; the log stays without an end."""
        self.begun.set()
        self.over.set()
        self.close()

    def _take(self, data: bytes, now: float, *, is_end: bool) -> None:
        if self.over.is_set() or not data:
            return
        if is_end:
            self._end(None)
            return
        chunk = _decode(data)
        if chunk.error is not None:
            self._end(str(chunk.error))
        elif chunk.usage is not None:
            self._count_to(chunk.usage, now)
        elif not self._has_usage and any(choice.has_content() for choice in chunk.choices):
            self._token(now)

    def _count_to(self, usage: _Usage, now: float) -> None:
        self._has_usage = True
        self.log.prompt_tokens = usage.prompt_tokens
        for _ in range(usage.completion_tokens - len(self.log.token_s)):
            self._token(now)

    def _token(self, now: float) -> None:
        self.log.token_s.append(now)
        self.reading.arrived(now)
        self.begun.set()

    def _end(self, error: str | None) -> None:
        self.log.end_s = time.monotonic() - self._start_s
        self.log.error = error
        self.begun.set()
        self.over.set()
        self.close()
