"""Server-sent events as the WHATWG text has them, step by step: the measure of our own reader.

Written from section 9.2.6 (Interpreting an event stream) and nothing else, to be right rather than fast. It
works on bytes, because the decoding that the text asks for changes none of its decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["BOM", "Dispatched", "dispatched", "lines"]

BOM = b"\xef\xbb\xbf"
_LF, _CR, _COLON, _SPACE = b"\n", b"\r", b":", b" "


class Dispatched(NamedTuple):
    """What a client sees of one event; `name` is empty for the default."""

    name: bytes
    data: bytes


def lines(stream: bytes) -> Iterator[tuple[bytes, bool]]:
    """Each line without its end, and whether it had one: CRLF, LF and CR all end a line."""
    line, at = b"", 0
    while at < len(stream):
        char = stream[at : at + 1]
        at += 1
        if char == _CR and stream[at : at + 1] == _LF:
            at += 1
        if char in (_CR, _LF):
            yield line, True
            line = b""
        else:
            line += char
    if line:
        yield line, False


def dispatched(stream: bytes, *, cut_off_counts: bool = False) -> list[Dispatched]:
    """The events that the stream dispatches.

    With `cut_off_counts`, what the end of the stream cuts off is dispatched too, where the text discards it.
    """
    if stream.startswith(BOM):
        stream = stream[len(BOM) :]
    events: list[Dispatched] = []
    name, data = b"", b""

    def dispatch() -> None:
        nonlocal name, data
        if data != b"":
            events.append(Dispatched(name, data[:-1] if data.endswith(_LF) else data))
        name, data = b"", b""

    for line, ended in lines(stream):
        if not ended and not cut_off_counts:
            return events
        if line == b"":
            dispatch()
            continue
        if line.startswith(_COLON):
            continue
        field, value = line, b""
        if _COLON in line:
            at = line.index(_COLON)
            field, value = line[:at], line[at + 1 :]
            if value.startswith(_SPACE):
                value = value[1:]
        if field == b"event":
            name = value
        elif field == b"data":
            data += value + _LF
    if cut_off_counts:
        dispatch()
    return events
