"""Event streams that no engine should send, drawn at random, and what has to hold for each of them.

A check takes a `random.Random` and nothing else, so that its seed is all that a failure needs to come again.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from support.metered import Outcome, meter_for, outcome_of, through
from support.transcripts import streams
from support.whatwg import BOM, Dispatched, dispatched
from support.wire import check_profile
from tokenflow_gateway.relay.dialects import DIALECTS, Meter
from tokenflow_gateway.relay.errors import EngineAborted, StreamTruncated
from tokenflow_gateway.relay.sse import SSEError, SSEReader

__all__ = [
    "OPENAI",
    "RECORDED",
    "check_meter",
    "check_reader",
    "check_stream",
    "client_bytes",
    "mutated",
    "reads_of",
]

RECORDED = [transcript for transcript in streams() if transcript.path in DIALECTS]
OPENAI = ("/v1/chat/completions", "/v1/completions")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_LINE_ENDS = (b"\n", b"\n", b"\r\n", b"\r")
_BLANK_LINE_BYTES = 4
"""By which events differ with the reads: blank lines belong to the event before them or to the next."""
_FIELDS = (
    b"data",
    b"data",
    b"data",
    b"event",
    b"id",
    b"retry",
    b"",
    b"dat",
    b"data ",
    b" data",
    b"DATA",
    b"\0",
)
_SEPARATORS = (b": ", b": ", b":", b":  ", b"", b" : ", b"::")
_ODD_EVENTS = (
    b"data: \n\n",
    b"data\n\n",
    b": ping\n\n",
    b"retry: 1\n\n",
    b"id: 1\n\n",
    b"event: error\ndata: {}\n\n",
    b"data: [DONE]\n\n",
    b"data:[DONE]\n\n",
    b'data: "[DONE]"\n\n',
    b"data: [1,2]\n\n",
    b"data: null\n\n",
    b"data: words\n\n",
    b'data: {"error":{"message":"m"}}\n\n',
    b'data: {"error":"m"}\n\n',
    b'data: {"object":"error","message":"m","code":500}\n\n',
    b'data: {"object":"error"}\n\n',
    b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"m"}}\n\n',
    b'data: {"choices":[]}\n\n',
    b'data: {"choices":null}\n\n',
    b'data: {"choices":[{}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":-5}}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":1e400}}\n\n',
    b"\n",
    b"\r\n",
    BOM,
)
_ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3.5, 1e300, 2**70, "", "x", "[DONE]", "data: [DONE]\n\n", "\r", "\u2028", "\0", [],
    [None], {}, {"a": 1},
)  # fmt: skip


# ---- streams -----------------------------------------------------------------------------------------------


def reads_of(draw: random.Random, stream: bytes) -> list[bytes]:
    """The stream in reads: whole, byte by byte, an event each, or cut at random, empty ones among them."""
    kind = draw.random()
    if kind < 0.1:
        return [stream]
    if kind < 0.2:
        return [stream[at : at + 1] for at in range(len(stream))]
    if kind < 0.6:
        return re.split(rb"(?<=\n\n)", stream)
    cuts = sorted(draw.randint(0, len(stream)) for _ in range(draw.randint(1, 12)))
    return [stream[start:end] for start, end in pairwise([0, *cuts, len(stream)])]


def odd_stream(draw: random.Random) -> bytes:
    """Lines of fields known and unknown, with any line ends, values and marks."""
    parts = [BOM] * draw.choice((0, 0, 0, 1, 2))
    for _ in range(draw.randint(0, 12)):
        parts += [draw.choice(_FIELDS), draw.choice(_SEPARATORS), _value(draw), draw.choice(_LINE_ENDS)]
        parts += [draw.choice(_LINE_ENDS) for _ in range(draw.choice((0, 0, 1, 1, 2, 3)))]
    stream = b"".join(parts)
    return stream[: draw.randint(0, len(stream))] if draw.random() < 0.3 else stream


def _value(draw: random.Random) -> bytes:
    kind = draw.random()
    if kind < 0.5:
        return draw.choice(
            (b"", b"x", b" ", b"a: b", b"[DONE]", b'{"a":1}', "é😀".encode(), b"\xff\xc3", b"\0")
        )
    if kind < 0.6:
        return b"y" * draw.choice((63, 64, 65, 1000))
    return bytes(draw.choice(b" :dat\xc3\xa9\xef\xbb\xbf\x00\x0b\x0cx") for _ in range(draw.randint(0, 8)))


def mutated(draw: random.Random, stream: bytes) -> bytes:
    """A recorded stream with one to four things wrong with it."""
    for _ in range(draw.randint(1, 4)):
        stream = draw.choice(_MUTATIONS)(draw, stream)
    return stream


def _flip(draw: random.Random, stream: bytes) -> bytes:
    at = draw.randrange(len(stream) + 1)
    return stream[:at] + bytes([draw.randrange(256)]) + stream[at + 1 :]


def _delete(draw: random.Random, stream: bytes) -> bytes:
    at = draw.randint(0, len(stream))
    return stream[:at] + stream[at + draw.choice((1, 1, 2, 50)) :]


def _cut(draw: random.Random, stream: bytes) -> bytes:
    return stream[: draw.randint(0, len(stream))]


def _line_ends(draw: random.Random, stream: bytes) -> bytes:
    end = draw.choice(_LINE_ENDS)
    return stream.replace(b"\n", end, draw.choice((1, 3, -1)))


def _shuffled(draw: random.Random, stream: bytes) -> bytes:
    """An event twice, out of its place, or one that does not belong there."""
    events = stream.split(b"\n\n")
    events.insert(draw.randint(0, len(events)), draw.choice((*events, *_ODD_EVENTS)).removesuffix(b"\n\n"))
    if draw.random() < 0.3:
        del events[draw.randrange(len(events))]
    return b"\n\n".join(events)


def _spliced(draw: random.Random, stream: bytes) -> bytes:
    other = draw.choice(RECORDED).data
    return stream[: draw.randint(0, len(stream))] + other[draw.randint(0, len(other)) :]


def _other_json(draw: random.Random, stream: bytes) -> bytes:
    """One chunk with a field missing, or of another type."""
    events = stream.split(b"\n\n")
    at = draw.randrange(len(events))
    head, brace, rest = events[at].partition(b"{")
    try:
        value = json.loads(brace + rest)
    except (ValueError, RecursionError):
        return stream
    holder: Any = value
    while isinstance(holder, dict) and holder:
        key = draw.choice(list(holder))
        below = holder[key][0] if isinstance(holder[key], list) and holder[key] else holder[key]
        if isinstance(below, dict) and draw.random() < 0.7:
            holder = below
            continue
        if draw.random() < 0.2:
            del holder[key]
        else:
            holder[key] = draw.choice(_ODD_VALUES)
        break
    indent = draw.choice((None, None, 0))
    text = json.dumps(value, indent=indent).encode()
    events[at] = head + text.replace(b"\n", b"\ndata: ")
    return b"\n\n".join(events)


_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip, _delete, _cut, _line_ends, _shuffled, _shuffled, _spliced, _other_json, _other_json,
)  # fmt: skip


# ---- what has to hold --------------------------------------------------------------------------------------


def check_reader(draw: random.Random) -> None:
    """Our reader sees what the standard's own words see, in any reads, up to the limit of one event."""
    stream = odd_stream(draw) if draw.random() < 0.9 else mutated(draw, draw.choice(RECORDED).data)
    limit = draw.choice((20, 70, 1200, 1 << 22))
    expected = dispatched(stream, cut_off_counts=True)
    reader = SSEReader(max_event_bytes=limit)
    events = []
    try:
        for read in reads_of(draw, stream):
            events += reader.feed(read)
            assert reader.pending_bytes <= limit
        events += reader.end()
    except SSEError:
        assert _largest_event(stream) + _BLANK_LINE_BYTES > limit, "an error without a reason"
        seen = [Dispatched(event.event, event.data) for event in events if event.has_data]
        assert seen == expected[: len(seen)]
        return
    assert all(len(event.raw) <= limit + 2 for event in events)
    assert [Dispatched(event.event, event.data) for event in events if event.has_data] == expected
    raw = b"".join(event.raw for event in events)
    assert raw.startswith(stream.removeprefix(BOM).rstrip(b"\r\n")), "bytes are lost"
    for event in events:
        plain = event.plain()
        assert dispatched(plain.raw) == [Dispatched(b"", plain.data)] or not event.has_data
        assert not event.has_data or _same(plain.data, event.data)


def _same(plain: bytes, data: bytes) -> bool:
    """The same data, or JSON that stands on one line now."""
    return plain == data or plain == data.replace(b"\n", b" ")


def _largest_event(stream: bytes) -> int:
    """Bytes of the longest event, blank lines before it included, or of what is left over at the end."""
    reader = SSEReader(max_event_bytes=len(stream) + 4)
    sizes = [len(event.raw) for event in reader.feed(stream)]
    return max([*sizes, reader.pending_bytes])


def check_meter(draw: random.Random) -> None:
    """A broken recording through the meter of its route: see `check_stream`."""
    transcript = draw.choice(RECORDED)
    stream = mutated(draw, transcript.data)
    check_stream(transcript.path, stream, reads_of(draw, stream), wants_usage=draw.random() < 0.5)


def check_stream(path: str, stream: bytes, reads: list[bytes], *, wants_usage: bool) -> None:
    """Whatever the engine sends, the client gets whole events and one end.

    It gets an error exactly if the stream was not whole; and neither bytes nor counts depend on the reads.
    """
    whole = _outcome(meter := meter_for(path, wants_usage=wants_usage), through(meter, [stream]))
    _check_reads(path, reads, wants_usage=wants_usage)
    meter = meter_for(path, wants_usage=wants_usage)
    assert _outcome(meter, through(meter, reads)) == whole, "it depends on the reads"
    pieces = meter_for(path, wants_usage=wants_usage)
    in_pieces = b"".join(piece.data for read in reads for piece in pieces.pieces(read))
    assert _outcome(pieces, in_pieces + pieces.end()) == whole, "it depends on the pieces"
    if path in OPENAI:
        received = check_profile(client_bytes(path, stream, wants_usage=wants_usage), json_only=False)
        fine = not meter.failed and not meter.aborted and (meter.done or meter.complete)
        assert (received.error is None) == fine, "an error where all was well, or none where it was not"


def _outcome(meter: Meter, data: bytes) -> Outcome:
    """What became of a stream, but for two things that may depend on the reads.

    The last blank line may lack an LF that came in a read of its own; and where several chunks contradict
    each other in their prompt's tokens, the last that was decoded counts.
    """
    return outcome_of(meter, data.rstrip(b"\r\n"))._replace(prompt_tokens=None)


def client_bytes(path: str, stream: bytes, *, wants_usage: bool) -> bytes:
    """What the relay makes of a stream, whole, for a client that knows OpenAI's."""
    meter = meter_for(path, wants_usage=wants_usage)
    data = through(meter, [stream])
    if meter.aborted:
        return data + DIALECTS[path].error_events(EngineAborted("given up"))
    if meter.done:
        return data
    return data + (
        meter.ending if meter.complete else DIALECTS[path].error_events(StreamTruncated("cut off"))
    )


def _check_reads(path: str, reads: Iterable[bytes], *, wants_usage: bool) -> None:
    """After each read: only whole events have left, and the counts are such that counters take them."""
    meter = meter_for(path, wants_usage=wants_usage)
    for read in reads:
        data = meter.feed(read)
        assert not data or len(_LINE_END.findall(data[len(data.rstrip(b"\r\n")) :])) >= 2, "half an event"
        assert meter.tokens >= 0
        assert meter.readable >= 0
