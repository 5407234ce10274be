"""Cutting a stream into events, and telling which of them bring text."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.transcripts import Transcript, load, streams
from tokenflow_client._events import MAX_HELD_BYTES, EventSplitter, content_pattern, count_chars, is_done

CHAT = load("chat_stream_scripts")
EVENTS = [event + b"\n\n" for event in CHAT.data.split(b"\n\n")[:-1]]

COMPLETIONS = [stream for stream in streams() if stream.path.endswith("/completions")]


def split(parts: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [event for part in parts for event in splitter.feed(part)] + [splitter.end()]


@given(st.lists(st.integers(0, 3000), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_come_out_whole_wherever_the_bytes_are_cut(cuts: list[int], newline: bytes) -> None:
    """The same events for every cut and every kind of line end, and not a byte changed."""
    data = b"".join(EVENTS[:10]).replace(b"\n", newline)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    out = split([data[start:end] for start, end in pairwise(edges)])
    assert out == [*(event.replace(b"\n", newline) for event in EVENTS[:10]), b""]


def test_byte_by_byte() -> None:
    """The worst cut of all, and a tail without its blank line, which is not lost."""
    data = b"".join(EVENTS) + b"data: cut o"
    assert split([data[at : at + 1] for at in range(len(data))]) == [*EVENTS, b"data: cut o"]


def test_an_event_without_end_passes_in_parts() -> None:
    """Memory is bounded, and the bytes are all there."""
    part = b"x" * 100_000
    splitter = EventSplitter()
    out = [event for _ in range(15) for event in splitter.feed(part)]
    assert out
    assert max(map(len, out)) <= MAX_HELD_BYTES + len(part)
    assert len(b"".join(out)) + len(splitter.end()) == 15 * len(part)


@pytest.mark.parametrize("transcript", COMPLETIONS, ids=lambda transcript: transcript.name)
def test_content_is_told_as_a_parser_tells_it(transcript: Transcript) -> None:
    """All recordings of completions by the real engine: text, tools, reasoning, usage, errors."""
    pattern = content_pattern(transcript.path)
    splitter = EventSplitter()
    for event in splitter.feed(transcript.data):
        assert (pattern.search(event) is not None) == _has_text(event), event


@pytest.mark.parametrize(
    ("delta", "brings"),
    [
        ({"content": '"content":"x"'}, True),
        ({"content": ""}, False),
        ({"content": None, "reasoning_content": "hm"}, False),
        ({"tool_calls": [{"function": {"arguments": '{"content": "x"}'}}]}, False),
        ({"content": "汉"}, True),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", " : ")])
def test_what_could_be_mistaken(delta: object, brings: bool, separators: tuple[str, str]) -> None:
    """Text about JSON, arguments that look like content, and any spacing."""
    event = json.dumps({"choices": [{"delta": delta}]}, separators=separators).encode()
    assert (content_pattern("/v1/chat/completions").search(event) is not None) is brings


def _has_text(event: bytes) -> bool:
    data = event.removeprefix(b"data: ").strip()
    chunk = {} if data == b"[DONE]" else json.loads(data)
    choices = chunk.get("choices") or []
    return any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices)


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("text", ["word", "日本🌍", 'say "content": "no"', "a\\\n\t\\", ""])
def test_code_points_of_an_event_are_counted(text: str, ascii_only: bool) -> None:
    """However they are written in JSON."""
    choice = {"delta": {"content": text, "reasoning_content": "not this"}}
    chunk = json.dumps({"choices": [choice]}, ensure_ascii=ascii_only)
    assert count_chars(f"data: {chunk}\n\n".encode()) == len(text)
    completion = json.dumps({"choices": [{"text": text}]}, ensure_ascii=ascii_only)
    assert count_chars(f"data:{completion}\n\n".encode()) == len(text)


def test_what_is_no_json_has_no_code_points() -> None:
    assert count_chars(b'data: {"content": "\xff"}\n\n') == 0


def test_the_last_event_is_known() -> None:
    """And is not what a model says about it."""
    assert is_done(b"data: [DONE]\n\n")
    assert is_done(b"data:[DONE]\r\n\r\n")
    assert not is_done(b'data: {"choices":[{"delta":{"reasoning_content":"data: [DONE]"}}]}\n\n')
