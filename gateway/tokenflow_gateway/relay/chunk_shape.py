"""What the text chunks of one stream have in common, so that most of them need not be decoded."""

from __future__ import annotations

import re

from tokenflow_gateway.relay.usage import Usage

__all__ = ["MOST_EVENT_BYTES", "ChunkShape", "Passed", "framed"]

MOST_EVENT_BYTES = 1024
"""Longer events are decoded: those of SGLang have 300 to 500 bytes."""
_KEYS = (b'"content":"', b'"text":"')
_USAGE = re.compile(
    rb',"usage":\{"prompt_tokens":\d+,"total_tokens":(\d+),"completion_tokens":(\d+)'
    rb'((?:,"[a-z_]+":(?:null|\d+))*\}\}\n\n)'
)
_COMPLETION = b',"completion_tokens":'
_MOST_DIGITS = 7
_CRLF = b"\r\n"
_HEADS = tuple(b"%x\r\n" % size for size in range(MOST_EVENT_BYTES + 1))
"""Of an HTTP chunk, by the bytes in it."""
_NO_HEAD = b"?"


def _heads_by_whole() -> tuple[bytes, ...]:
    heads = [_NO_HEAD] * (MOST_EVENT_BYTES + len(_HEADS[-1]) + len(_CRLF) + 1)
    for size, head in enumerate(_HEADS):
        heads[len(head) + size + len(_CRLF)] = head
    return tuple(heads)


_HEADS_BY_WHOLE = _heads_by_whole()
"""The same by the bytes of the whole HTTP chunk; `_NO_HEAD` where none has so many."""


def framed(event: bytes) -> bytes:
    """An event of at most `MOST_EVENT_BYTES` as an HTTP chunk of its own."""
    return _HEADS[len(event)] + event + _CRLF


Passed = tuple[bytes, str, int]
"""A chunk that fits: itself for the client, framed; its text; the answer's tokens so far, 0 where chunks
carry no usage."""


class ChunkShape:
    """Learned from a chunk that has been decoded; engines write the next with the same bytes around the text.

    A chunk fits if it is the same JSON with another text and, with usage in the chunk (`counted`), other
    totals: then its meaning is known without decoding it. Text with escapes or with anything that is not
    printable does not fit, although it may be right: such chunks are decoded.
    """

    __slots__ = (
        "_after",
        "_after_size",
        "_before",
        "_before_size",
        "_end",
        "_end_size",
        "_kept",
        "_rest",
        "counted",
    )

    def __init__(self, *, before: bytes, after: bytes, end: bytes, kept: int, rest: bytes | None) -> None:
        """`before` the text, and `after` it up to the total, `end` behind the completion tokens.

        Where the usage is cut, `kept` bytes of `after` stay, and `rest` follows them; None: all stays.
        """
        self.counted = end != b""
        self._before = before
        self._before_size = len(before)
        self._after = after
        self._after_size = len(after)
        self._end = end + _CRLF
        self._end_size = len(self._end)
        self._kept = kept
        self._rest = None if rest is None else rest + _CRLF

    @classmethod
    def of(
        cls, raw: bytes, text: str, usage: Usage | None, *, cut_usage: bool, leaves_null: bool
    ) -> ChunkShape | None:
        """The shape of an event with one choice, this text and this usage; None where it has none."""
        key = next((key for key in _KEYS if raw.count(key) == 1), None)
        if key is None or not raw.endswith(b"}\n\n") or len(raw) > MOST_EVENT_BYTES:
            return None
        start = raw.index(key) + len(key)
        stop = raw.find(b'"', start)
        if stop < 0 or raw[start:stop] != text.encode("utf-8", "replace"):
            return None
        if usage is None:
            shape = cls(before=raw[:start], after=raw[stop:], end=b"", kept=0, rest=None)
            completion = 0
        else:
            found = _USAGE.search(raw, stop)
            if found is None or found.end() != len(raw):
                return None
            rest = b',"usage":null}\n\n' if leaves_null else b"}\n\n"
            shape = cls(
                before=raw[:start],
                after=raw[stop : found.start(1)],
                end=found[3],
                kept=found.start() - stop,
                rest=rest if cut_usage else None,
            )
            completion = usage.completion
        passed = shape.read(framed(raw))
        return shape if passed is not None and passed[1:] == (text, completion) else None

    def read(self, chunk: bytes) -> Passed | None:
        """What becomes of `chunk`, if it is one whole HTTP chunk with one event that fits.

        Without usage where that is cut, as `usage.without_usage` has it.
        """
        size = len(chunk)
        if size >= len(_HEADS_BY_WHOLE):
            return None
        head = _HEADS_BY_WHOLE[size]
        event_at = len(head)
        start = event_at + self._before_size
        stop = chunk.find(b'"', start)
        if (
            not chunk.startswith(head)
            or not chunk.startswith(self._before, event_at)
            or not chunk.startswith(self._after, stop)
            or not chunk.endswith(self._end)
        ):
            return None
        try:
            text = chunk[start:stop].decode()
        except UnicodeDecodeError:
            return None
        if not text or not text.isprintable() or "\\" in text:
            return None
        total_at = stop + self._after_size
        if not self.counted:
            fits = total_at == size - self._end_size
            return (chunk, text, 0) if fits else None
        total, _, completion = chunk[total_at : -self._end_size].partition(_COMPLETION)
        if not total.isdigit() or not completion.isdigit() or len(completion) > _MOST_DIGITS:
            return None
        if self._rest is None:
            return chunk, text, int(completion)
        event = chunk[event_at : stop + self._kept] + self._rest
        return _HEADS[len(event) - len(_CRLF)] + event, text, int(completion)
