"""What the text chunks of one stream have in common, so that most of them need not be decoded."""

from __future__ import annotations

import re

from tokenflow_gateway.relay.usage import Usage

__all__ = ["ChunkShape"]

_KEYS = (b'"content":"', b'"text":"')
_USAGE = re.compile(
    rb',"usage":\{"prompt_tokens":\d+,"total_tokens":(\d+),"completion_tokens":(\d+)'
    rb'((?:,"[a-z_]+":(?:null|\d+))*\}\}\n\n)'
)
_COMPLETION = b',"completion_tokens":'
_MOST_DIGITS = 7


class ChunkShape:
    """Learned from a chunk that has been decoded; engines write the next with the same bytes around the text.

    A chunk fits if it is the same JSON with another text and, with usage in the chunk (`counted`), other
    totals: then its meaning is known without decoding it. Text with escapes or with anything that is not
    printable does not fit, although it may be right: such chunks are decoded.
    """

    __slots__ = ("_after", "_before", "_end", "_kept", "_text_at", "_without_usage", "counted")

    def __init__(self, *, before: bytes, after: bytes, end: bytes, kept: int, leaves_null: bool) -> None:
        """`before` the text, and `after` it up to the total; `kept` of that stays when the usage is cut."""
        self._before = before
        self._text_at = len(before)
        self._after = after
        self._end = end
        self._kept = kept
        self._without_usage = b',"usage":null}\n\n' if leaves_null else b"}\n\n"
        self.counted = end != b""

    @classmethod
    def of(cls, raw: bytes, text: str, usage: Usage | None, *, leaves_null: bool) -> ChunkShape | None:
        """The shape of an event with one choice, this text and this usage; None where it has none."""
        key = next((key for key in _KEYS if raw.count(key) == 1), None)
        if key is None or not raw.endswith(b"}\n\n"):
            return None
        start = raw.index(key) + len(key)
        stop = raw.find(b'"', start)
        if stop < 0 or raw[start:stop] != text.encode("utf-8", "replace"):
            return None
        if usage is None:
            whole = cls(before=raw[:start], after=raw[stop:], end=b"", kept=0, leaves_null=False)
            return whole if whole.read(raw) == (text, 0) else None
        found = _USAGE.search(raw, stop)
        if found is None or found.end() != len(raw):
            return None
        shape = cls(
            before=raw[:start],
            after=raw[stop : found.start(1)],
            end=found[3],
            kept=found.start() - stop,
            leaves_null=leaves_null,
        )
        return shape if shape.read(raw) == (text, usage.completion) else None

    def read(self, raw: bytes) -> tuple[str, int] | None:
        """Text and completion tokens (0 where chunks carry none) of `raw`, if it is one event that fits."""
        start = self._text_at
        stop = raw.find(b'"', start)
        if not raw.startswith(self._before) or not raw.startswith(self._after, stop) or start == stop:
            return None
        tokens = 0
        if self.counted:
            total_at = stop + len(self._after)
            total_end = raw.find(_COMPLETION, total_at)
            completion = raw[total_end + len(_COMPLETION) : -len(self._end)]
            if (
                not raw.endswith(self._end)
                or not completion.isdigit()
                or not raw[total_at:total_end].isdigit()
                or len(completion) > _MOST_DIGITS
            ):
                return None
            tokens = int(completion)
        elif len(raw) != stop + len(self._after):
            return None
        try:
            text = raw[start:stop].decode()
        except UnicodeDecodeError:
            return None
        return (text, tokens) if text.isprintable() and "\\" not in text else None

    def cut(self, raw: bytes) -> bytes:
        """An event that fits, as the engine would have sent it without usage; see `usage.without_usage`."""
        return raw[: raw.find(b'"', self._text_at) + self._kept] + self._without_usage
