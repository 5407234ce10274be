"""The traces that are JSON.

Mooncake (github.com/kvcache-ai/Mooncake, FAST '25): an object a line with `timestamp` in milliseconds,
`input_length`, `output_length`; `hash_ids` name shared prefixes, which are not used here. ShareGPT: one list
of `{"id", "conversations": [{"from", "value"}, ...]}`, without times and token counts. Of each conversation
the first question and its answer are taken, as vLLM's benchmarks do, at `CHARS_PER_TOKEN` characters a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from tokenflow_bench.traces.errors import RowError
from tokenflow_bench.traces.rows import Row, Rows, as_count, as_seconds

__all__ = ["MooncakeFormat", "ShareGptFormat"]

CHARS_PER_TOKEN = 4.0
"""English, about."""
_CHUNK_CHARS = 1 << 20
_ASKS, _ANSWERS = {"human", "user"}, {"gpt", "assistant", "chatgpt", "bing", "bard"}


class MooncakeFormat:
    """Lines of JSON."""

    def fits(self, head: str) -> bool:
        """Whether a file that begins with this line is one."""
        return head.lstrip().startswith("{")

    def rows(self, file: TextIO) -> Rows:
        """All of them, read as they are asked for."""
        for line, text in enumerate(file, start=1):
            if text.strip():
                said = _object(text, line)
                yield Row(
                    line,
                    as_seconds(_field(said, "timestamp", line), "timestamp", line=line) / 1000,
                    as_count(_field(said, "input_length", line), "input_length", line=line),
                    as_count(_field(said, "output_length", line), "output_length", line=line),
                )


class ShareGptFormat:
    """One list, of which no more than one piece is in memory."""

    def fits(self, head: str) -> bool:
        """Whether a file that begins with this line is one."""
        return head.lstrip().startswith("[")

    def rows(self, file: TextIO) -> Rows:
        """Conversations that begin with a question and have an answer; others say nothing of lengths."""
        for line, said in _elements(file):
            if not isinstance(said, dict) or not isinstance(said.get("conversations"), list):
                raise RowError("not an object with a list of conversations", line)
            texts = [_turn(turn, line) for turn in said["conversations"][:2]]
            if [kind for kind, _ in texts] == ["asks", "answers"]:
                prompt, output = (_tokens(text) for _, text in texts)
                yield Row(line, None, prompt, output)


def _turn(turn: Any, line: int) -> tuple[str, str]:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise RowError("a turn of a conversation without a text in `value`", line)
    speaker = turn.get("from")
    return "asks" if speaker in _ASKS else "answers" if speaker in _ANSWERS else "other", turn["value"]


def _tokens(text: str) -> int:
    return round(len(text) / CHARS_PER_TOKEN)


def _object(text: str, line: int) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON: {error.msg}", line) from None
    if not isinstance(said, dict):
        raise RowError("not an object", line)
    return said


def _field(said: dict[str, Any], name: str, line: int) -> Any:
    if name not in said:
        raise RowError(f"no {name}", line)
    return said[name]


def _elements(file: TextIO) -> Iterator[tuple[int, Any]]:
    """Each element of a JSON list and the line on which it begins."""
    decoder, text, at, line, is_end = json.JSONDecoder(), "", 0, 1, False
    opened = False
    while True:
        start = at
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if not opened and at < len(text):
            assert text[at] == "[", "that is how the format was told"
            opened, at = True, at + 1
            line += text.count("\n", start, at)
            continue
        line += text.count("\n", start, at)
        if at < len(text) and text[at] == "]":
            return
        try:
            said, after = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            if is_end:
                raise RowError(f"not JSON: {error.msg}", line) from None
            more = file.read(_CHUNK_CHARS)
            text, at, is_end = text[at:] + more, 0, not more
            continue
        yield line, said
        line += text.count("\n", at, after)
        at = after
