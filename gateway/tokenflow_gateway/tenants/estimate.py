"""How many tokens a request is going to take, before anything has read it."""

from __future__ import annotations

import math
import re
from typing import Final

import msgspec

__all__ = ["Estimate", "estimate"]

_BYTES_PER_TOKEN: Final = 4.0
"""Of JSON with a prompt in it: English text has 4 to 5, other scripts fewer; JSON itself makes up for it."""
_PROMPTS: Final = frozenset({"messages", "prompt", "input", "system", "instructions", "tools"})
_LENGTHS: Final = frozenset({"max_completion_tokens", "max_tokens", "max_output_tokens"})
_ANSWERS: Final = frozenset({"n", "best_of"})
"""Answers to each prompt: those that the client gets, and those of which it gets the best."""
_MOST: Final = 10_000_000
_MOST_ANSWERS: Final = 128


class Estimate(msgspec.Struct, frozen=True, gc=False):
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
    size, length, answers = 0, -1, 1
    for name, raw in parsed.items():
        if name in _PROMPTS:
            size += memoryview(raw).nbytes
        elif name in _LENGTHS:
            length = max(length, _integer(raw))
        elif name in _ANSWERS:
            answers = max(answers, _integer(raw))
    output = assumed_output if length < 0 else min(length, most_output)
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


def _integer(raw: msgspec.Raw) -> int:
    """A count; below 0 for what is none, of which the engine is the judge."""
    try:
        return min(_decode_integer(raw), _MOST)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return -1
