"""Cuts a stream of server-sent events into events, unchanged, so that each can be handed over by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

__all__ = ["EventSplitter", "content_pattern", "count_chars", "is_done"]

_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LF_BOUNDARY = re.compile(rb"\n\n")
_LONGEST_BOUNDARY = 4
_PATTERNS = {
    # A key of JSON cannot be part of a JSON string: there its quotes would have backslashes.
    "content": re.compile(rb'"content"\s*:\s*"(?!")'),
    "text": re.compile(rb'"text"\s*:\s*"(?!")'),
}
_STRING = re.compile(rb'"(?:content|text)"\s*:\s*("(?:[^"\\]|\\.)*")')
_DONE = re.compile(rb"data:\s*\[DONE\]")
MAX_HELD_BYTES = 1 << 20


def content_pattern(path: str) -> re.Pattern[bytes]:
    """What an event of the answer to this path contains if it brings text for the reader.

    Reasoning (``reasoning_content``), tool calls and empty deltas bring none.
    """
    return _PATTERNS["content" if path.endswith("/chat/completions") else "text"]


def count_chars(event: bytes) -> int:
    """Unicode code points of text for the reader in one event that brings some."""
    try:
        return sum(len(json.loads(text)) for text in _STRING.findall(event))
    except ValueError:  # no JSON: whoever parses the answer will say so
        return 0


def is_done(event: bytes) -> bool:
    """Whether this is the last event of an answer."""
    return _DONE.match(event) is not None


class EventSplitter:
    """Bytes in as they come, whole events out. All bytes come out, in order and unchanged.

    Of an event that is not complete at most `MAX_HELD_BYTES` are held back; a longer one passes in parts.
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that these bytes complete."""
        if self._held:
            yield from self._feed_held(data)
            return
        start = 0
        # The alternatives cost ten times as much as the one that everybody sends.
        for boundary in (_BOUNDARY if b"\r" in data else _LF_BOUNDARY).finditer(data):
            end = boundary.end()
            yield data if end - start == len(data) else data[start:end]
            start = end
        self._held += data[start:]

    def end(self) -> bytes:
        """What is left when the stream is over."""
        rest = bytes(self._held)
        self._held.clear()
        return rest

    def _feed_held(self, data: bytes) -> Iterator[bytes]:
        seen = max(0, len(self._held) - _LONGEST_BOUNDARY + 1)
        self._held += data
        boundary = _BOUNDARY.search(self._held, seen)
        if boundary is None:
            if len(self._held) > MAX_HELD_BYTES:
                yield self.end()
            return
        whole = self.end()
        yield whole[: boundary.end()]
        yield from self.feed(whole[boundary.end() :])
