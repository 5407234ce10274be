"""Server-sent events, split off a byte stream as it arrives and passed on as the bytes they were.

Parsing follows the WHATWG rules (https://html.spec.whatwg.org/multipage/server-sent-events.html) with one
difference: an event cut off by the end of the stream before its blank line is still delivered, by `end`.
Text is never decoded, so a character split between two reads needs no care.
"""

from __future__ import annotations

import re

__all__ = ["MAX_EVENT_BYTES", "Event", "SSEError", "SSEReader", "is_done"]

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Default limit of one event: room for any tool call, a bound for an upstream gone wrong."""

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")
_DATA_LINE = re.compile(rb"(?<![^\r\n])data(?:: ?([^\r\n]*))?(?=[\r\n]|\Z)")
_LINE_ENDS = re.compile(rb"[\r\n]*")
_BLANK_LINE = re.compile(rb"\n\n|\n\r\n?|\r\n\r\n?|\r\r\n?")  # two line ends, with or without CRs
_BLANK_LINE_MAX_BYTES = 4


class SSEError(ValueError):
    """The stream cannot be split any further; events after the last ones returned are lost."""


class Event:
    """One event, comment block or stray field as it came.

    `raw` is its bytes, terminator included: the `raw` of all events joined are the stream. Blank lines in
    front of it, which mean nothing, are part of it. The rest is parsed when asked for.
    """

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def __repr__(self) -> str:
        return f"Event({self.raw!r})"

    @property
    def is_plain(self) -> bool:
        """Whether it is one line ``data: ...`` and a blank line, ended by LF: what every client can read."""
        raw = self.raw
        return raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw

    def plain(self) -> Event:
        """The event with its data only, as `is_plain` has it; itself if it is that, or has no data.

        JSON comes to stand on one line, since clients exist that read line by line. Other data of several
        lines keeps them.
        """
        if self.is_plain or not self.has_data:
            return self
        data = self.data
        line_break = b" " if data.lstrip().startswith((b"{", b"[")) else b"\ndata: "
        return Event(b"data: " + data.replace(b"\n", line_break) + b"\n\n")

    @property
    def data(self) -> bytes:
        """The values of the data lines joined by LF; empty where there is none (see `has_data`)."""
        if self.is_plain:
            return self.raw[6:-2]
        return b"\n".join(_DATA_LINE.findall(self.raw))

    @property
    def has_data(self) -> bool:
        """Whether a client would be handed this event: without a data line it is dropped."""
        return self.raw.startswith(b"data:") or _DATA_LINE.search(self.raw) is not None

    @property
    def event(self) -> bytes:
        """The event's name; empty for the default, ``message``."""
        if b"event" not in self.raw:
            return b""
        return next((value for name, value in reversed(self._fields()) if name == b"event"), b"")

    @property
    def is_comment(self) -> bool:
        """Whether there is no field in it at all, only comments."""
        return not self.raw.startswith(b"data:") and not self._fields()

    def _fields(self) -> list[tuple[bytes, bytes]]:
        """Name and value of every line that is no comment."""
        lines = (line.partition(b":") for line in _LINE_END.split(self.raw) if line)
        return [(name, value.removeprefix(b" ")) for name, _, value in lines if name]


def is_done(event: Event) -> bool:
    """Whether this is OpenAI's end of stream: ``[DONE]`` is all of its data, not a part of some text."""
    return b"[DONE]" in event.raw and event.data.strip() == b"[DONE]"


class SSEReader:
    """Splits one stream into events. Not shared between streams.

    An event is returned by the `feed` that brings its blank line. What is held back is at most
    `max_event_bytes` (see `pending_bytes`).
    """

    __slots__ = ("_begun", "_max_event_bytes", "_pending", "_searched", "_seen_cr", "_text_at")

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._pending = bytearray()
        self._text_at = 0  # blank lines in front of it, which mean nothing, end at this offset of `_pending`
        self._searched = 0  # no blank line ends before this offset of `_pending`
        self._begun = False  # past the place where a byte order mark may stand
        self._seen_cr = False  # without one, a search for LF LF finds every blank line

    @property
    def pending_bytes(self) -> int:
        """Bytes held until the rest of their event arrives."""
        return len(self._pending)

    @property
    def between_events(self) -> bool:
        """What comes next begins an event, of a stream without CRs so far."""
        return self._begun and not self._pending and not self._seen_cr

    def feed(self, data: bytes) -> list[Event]:
        """The events completed by `data`, in order.

        Raises `SSEError` when one event exceeds `max_event_bytes`; the reader is of no use after that.
        """
        self._seen_cr = self._seen_cr or b"\r" in data
        if not self._begun and not self._pending:
            self._begun = not _BOM.startswith(data[:1])
        plain = self._begun and not self._pending and not self._seen_cr and data.endswith(b"\n\n")
        if plain and len(data) <= self._max_event_bytes:
            if 0 < data.find(b"\n\n") == len(data) - 2:
                return [Event(data)]
            if b"\n\n\n" not in data and not data.startswith(b"\n"):
                return [Event(block + b"\n\n") for block in data[:-2].split(b"\n\n")]
        self._pending += data
        return self._split() if self._begin() else []

    def end(self) -> list[Event]:
        """What the stream's end leaves over, with the missing end of its blank line added."""
        tail = bytes(self._pending)
        self._pending.clear()
        if not tail.strip(b"\r\n"):
            return []
        return [Event(tail + _missing_end(tail))]

    def _begin(self) -> bool:
        """Drop the byte order mark once; False while it cannot be told whether there is one."""
        if self._begun:
            return True
        head = bytes(self._pending[: len(_BOM)])
        if head == _BOM:
            del self._pending[: len(_BOM)]
        self._begun = head == _BOM or not _BOM.startswith(head)
        return self._begun

    def _split(self) -> list[Event]:
        """Take all whole events off the front of `_pending`."""
        events: list[Event] = []
        start = 0
        while (end := self._event_end(start)) is not None:
            self._check_size(end - start)
            events.append(Event(bytes(self._pending[start:end])))
            start = self._searched = end
        del self._pending[:start]
        self._text_at -= start
        self._searched = max(0, len(self._pending) - _BLANK_LINE_MAX_BYTES + 1)
        self._check_size(len(self._pending))
        return events

    def _event_end(self, start: int) -> int | None:
        """Where the event that begins at `start` ends, or None while that is not known."""
        lines = _LINE_ENDS.match(self._pending, max(start, self._text_at))
        assert lines
        self._text_at = lines.end()
        search_from = max(self._text_at, self._searched)
        if not self._seen_cr:
            at = self._pending.find(b"\n\n", search_from)
            return at + 2 if at >= 0 else None
        blank = _BLANK_LINE.search(self._pending, search_from)
        # A CR after a CRLF is half of the next CRLF: its LF is on the way and belongs to this event.
        if blank is None or (blank.end() == len(self._pending) and blank[0] == b"\r\n\r"):
            return None
        return blank.end()

    def _check_size(self, event_bytes: int) -> None:
        if event_bytes > self._max_event_bytes:
            raise SSEError(
                f"an event of the upstream is longer than {self._max_event_bytes} bytes: "
                "raise the limit, or look at what the upstream sends"
            )


def _missing_end(tail: bytes) -> bytes:
    """What makes `tail`, which ends in the middle of an event, end in a blank line."""
    return b"\n" if tail.endswith((b"\n", b"\r\n\r")) else b"\n\n"
