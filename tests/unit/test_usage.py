"""Usage cut out of chunks: the bytes that the engine would have sent without being asked for it."""

from __future__ import annotations

import json
import re

import pytest

from support.transcripts import Transcript, load, names
from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.meter import StreamMeter
from tokenflow_gateway.relay.sse import Event
from tokenflow_gateway.relay.usage import without_usage

USAGE = b'{"prompt_tokens":37,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":2}}'
CHUNK = b'data: {"id":"a","choices":[{"index":0,"delta":{"reasoning_content":null,"content":"The"}}]'
TOOLS = b'data: {"id":"a","choices":[{"index":0,"delta":{"role":null,"content":null,"tool_calls":[]}}]'
TEXT = b'data: {"id":"a","object":"text_completion","choices":[{"index":0,"text":"a"}]'


def cut(raw: bytes) -> bytes:
    """What the meter makes of one event."""
    track = ReaderTrack(reader="human", declared_rate=None, now=0.0)
    return StreamMeter(track, max_event_bytes=1 << 20, keep_usage=False, cut_usage=True).feed(raw)


@pytest.mark.parametrize(
    ("head", "rest"), [(CHUNK, b"}\n\n"), (TOOLS, b',"usage":null}\n\n'), (TEXT, b',"usage":null}\n\n')]
)
def test_each_kind_of_chunk_becomes_what_it_is_without_being_asked(head: bytes, rest: bytes) -> None:
    assert cut(head + b',"usage":' + USAGE + b"}\n\n") == head + rest


def test_text_that_reads_like_usage_stays() -> None:
    text = json.dumps('x,"usage":{"completion_tokens":1}}').encode()
    head = b'data: {"choices":[{"index":0,"delta":{"content":' + text + b"}}]"
    assert cut(head + b',"usage":' + USAGE + b"}\n\n") == head + b"}\n\n"


@pytest.mark.parametrize(
    "raw",
    [
        b'data: {"usage":%b,"choices":[{"x":{"a":1,"usage":{}}}]}\n\n' % USAGE,
        b'data: {"choices":[],"usage":%b,"sglext":{"a":{}}}\n\n' % USAGE,
        b'data: {"choices":[],\r\ndata: "usage":%b}\r\n\r\n' % USAGE,
        b'data:{"choices":[], "usage": %b}\n\n' % USAGE,
        b'event: x\ndata: {"choices":[],"usage":%b}\n\n' % USAGE,
    ],
)
def test_what_is_built_in_another_way_loses_its_usage_and_nothing_else(raw: bytes) -> None:
    before, after = Event(raw), Event(without_usage(Event(raw), leaves_null=False))
    expected = json.loads(before.data)
    del expected["usage"]
    assert json.loads(after.data) == expected
    assert after.event == before.event


# ---- what the real engine sends, asked and not asked --------------------------------------------------


def shapes(data: bytes) -> set[tuple[str, ...]]:
    """The fields of each event, in order, with what does not depend on what was said."""
    found = set()
    for event in data.split(b"\n\n"):
        if event.startswith(b"data: {"):
            chunk = json.loads(event[6:])
            choice = chunk["choices"][0]
            keys = [*chunk, *choice, *choice["delta"]] if "delta" in choice else [*chunk, *choice]
            found.add((*keys, str(chunk.get("usage", "absent"))))
    return found


def relayed(transcript: Transcript, *, cut_usage: bool) -> tuple[bytes, StreamMeter, ReaderTrack]:
    track = ReaderTrack(reader="human", declared_rate=None, now=0.0)
    meter = StreamMeter(track, max_event_bytes=1 << 20, keep_usage=False, cut_usage=cut_usage)
    return b"".join(meter.feed(read.data) for read in transcript.reads) + meter.end(), meter, track


CONTINUOUS = [name for name in names() if name.endswith("_continuous")]


@pytest.mark.parametrize("name", CONTINUOUS)
def test_every_token_of_the_engine_is_counted_as_it_comes(name: str) -> None:
    """Until the final usage only the tokens that end choices are missing, and what a tool parser keeps."""
    transcript = load(name)
    total = int(re.findall(rb'"completion_tokens":(\d+)', transcript.data)[-1])
    track = ReaderTrack(reader="human", declared_rate=None, now=0.0)
    meter = StreamMeter(track, max_event_bytes=1 << 20, keep_usage=False, cut_usage=True)
    ends, before = transcript.data.count(b'"finish_reason":"'), 0
    for read in transcript.reads:
        meter.feed(read.data)
        before = before if meter.settled else meter.tokens
    assert before <= total
    assert before >= total - ends or "tools" in name
    assert meter.tokens == total


@pytest.mark.parametrize(
    ("name", "unasked"),
    [
        ("chat_stream_usage_continuous", "chat_stream"),
        ("chat_stream_n2_continuous", "chat_stream_n2"),
        ("chat_stream_tools_continuous", "chat_stream_tools"),
        ("completions_stream_continuous", "completions_stream"),
    ],
)
def test_a_client_that_did_not_ask_cannot_tell(name: str, unasked: str) -> None:
    """The recording of a request that did not ask is the measure."""
    out, _, _ = relayed(load(name), cut_usage=True)
    plain, _, _ = relayed(load(unasked), cut_usage=False)
    assert shapes(out) == shapes(plain)


def test_a_client_that_asked_gets_the_engines_bytes() -> None:
    transcript = load("chat_stream_usage_continuous")
    out, _, _ = relayed(transcript, cut_usage=False)
    assert out.count(b'"usage"') == transcript.data.count(b'"usage"') - 1
