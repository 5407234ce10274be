"""How many tokens a request is going to take, before anything has read it."""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

import msgspec

__all__ = ["Estimate", "estimate"]

_BYTES_PER_TOKEN: Final = 4.0
"""Of JSON with a prompt in it: English text has 4 to 5, other scripts fewer; JSON itself makes up for it."""
_PROMPTS: Final = ("messages", "prompt", "input", "system", "instructions", "tools")
_LENGTHS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_ANSWERS: Final = ("n", "best_of")
"""Answers to each prompt: those that the client gets, and those of which it gets the best."""
_MOST: Final = 10_000_000
_MOST_ANSWERS: Final = 128


class Estimate(NamedTuple):
    """Tokens."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


_decode_integer = msgspec.json.Decoder(int).decode
_SEVERAL: Final = re.compile(rb"\[\s*(?P<first>[\"\[])")


def estimate(parsed: dict[str, msgspec.Raw], *, assumed_output: int, most_output: int) -> Estimate:
    """`assumed_output`: of a request that names no length; `most_output`: what is taken of one that does."""
    size = sum([memoryview(parsed[name]).nbytes for name in _PROMPTS if name in parsed])
    given = [_integer(parsed[name]) for name in _LENGTHS if name in parsed]
    lengths = [length for length in given if length is not None]
    output = min(max(lengths), most_output) if lengths else assumed_output
    answers = max([_integer(parsed[name]) or 1 for name in _ANSWERS if name in parsed], default=1)
    answers = min(answers, _MOST_ANSWERS) * _prompts(parsed.get("prompt"))
    return Estimate(math.ceil(size / _BYTES_PER_TOKEN), output * answers)


def _prompts(raw: msgspec.Raw | None) -> int:
    """Texts that `/v1/completions` is to go on from: a list of texts, or of lists of ids, has several.

    Counted by their quotes or brackets, as a list of millions takes long to make: of several texts, one that
    ends in a backslash counts half.
    """
    if raw is None or (several := _SEVERAL.match(memoryview(raw))) is None:
        return 1
    body = bytes(raw)
    if several["first"] == b"[":
        return body.count(b"[") - 1
    return (body.count(b'"') - body.count(b'\\"') + 1) // 2


def _integer(raw: msgspec.Raw) -> int | None:
    """A count; None for what is none, of which the engine is the judge."""
    try:
        value = _decode_integer(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return min(value, _MOST) if value >= 0 else None
