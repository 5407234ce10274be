"""What is taken without decoding means what the decoder would have said, in recordings and near misses."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.transcripts import load
from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay import meter as meter_module
from tokenflow_gateway.relay.chunk_shape import ChunkShape
from tokenflow_gateway.relay.meter import StreamMeter
from tokenflow_gateway.relay.usage import Usage

RECORDED = (
    "chat_stream",
    "chat_stream_emoji_continuous",
    "chat_stream_interval_continuous",
    "chat_stream_length",
    "chat_stream_logprobs",
    "chat_stream_n2_continuous",
    "chat_stream_reasoning_continuous",
    "chat_stream_scripts",
    "chat_stream_tools_continuous",
    "chat_stream_usage_continuous",
    "completions_stream",
    "completions_stream_continuous",
)
HEAD = b'data: {"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"'
TAIL = b'"},"finish_reason":null}]'
PLAIN_END = b"}\n\n"


def chunk(text: bytes, completion: bytes | None = None, *, rest: bytes = b"") -> bytes:
    usage = b""
    if completion is not None:
        usage = b',"usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":%b%b}' % (completion, rest)
    return HEAD + text + TAIL + usage + PLAIN_END


def shape(text: str = "a", completion: int | None = 3) -> ChunkShape:
    usage = None if completion is None else Usage(5, completion)
    raw = chunk(text.encode(), None if completion is None else b"%d" % completion)
    made = ChunkShape.of(raw, text, usage, leaves_null=False)
    assert made is not None
    return made


def metered(reads: list[bytes], *, shapes: bool, cut: bool) -> tuple[object, ...]:
    """All that a meter makes of these reads, and how many chunks it took undecoded."""
    track = ReaderTrack(reader="human", declared_rate=None, now=time.monotonic())
    meter = StreamMeter(track, max_event_bytes=1 << 20, keep_usage=not cut, cut_usage=cut)
    if not shapes:
        meter._misfits = meter_module._MOST_MISFITS
    out, counts = b"", []
    for data in reads:
        out += meter.feed(data)
        counts.append((meter.tokens, meter.readable, meter.events))
    out += meter.end()
    return out, counts, meter.done, meter.complete, track.shape.chars, track.shape.wide_chars


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", RECORDED)
def test_recordings_are_metered_alike_with_and_without_shapes(name: str, cut: bool) -> None:
    reads = [read.data for read in load(name).reads]
    assert metered(reads, shapes=True, cut=cut) == metered(reads, shapes=False, cut=cut)


@pytest.mark.parametrize("name", ["chat_stream_length", "chat_stream_usage_continuous", "completions_stream"])
def test_most_chunks_of_a_recording_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = 0
    read = ChunkShape.read

    def counted(self: ChunkShape, raw: bytes) -> tuple[str, int] | None:
        nonlocal fitted
        said = read(self, raw)
        fitted += said is not None
        return said

    monkeypatch.setattr(ChunkShape, "read", counted)
    reads = [read.data for read in load(name).reads]
    metered(reads, shapes=True, cut=True)
    assert fitted > len(reads) / 2


def test_a_chunk_that_fits_is_read_and_cut() -> None:
    made = shape()
    assert made.read(chunk(b"tok\xc3\xa9n", b"4")) == ("tokén", 4)
    assert made.cut(chunk(b"token", b"4")) == chunk(b"token")
    assert shape(completion=None).read(chunk(b"token")) == ("token", 0)


@pytest.mark.parametrize(
    "raw",
    [
        chunk(b"", b"4"),
        chunk(rb"a\"b", b"4"),
        chunk(rb"a\nb", b"4"),
        chunk(b"a\n\ndata: b", b"4"),
        chunk(b"a\rb", b"4"),
        chunk(b"a\x00b", b"4"),
        chunk(b"a\xffb", b"4"),
        chunk(b'a","role":"x', b"4"),
        chunk(b"a", b"4.5"),
        chunk(b"a", b"-4"),
        chunk(b"a", b""),
        chunk(b"a", b"1" * 30),
        chunk(b"a", b"4", rest=b',"reasoning_tokens":1'),
        chunk(b"a", b'4},"usage":{"completion_tokens":5'),
        chunk(b"a"),
        chunk(b"a", b"4") + chunk(b"b", b"5"),
        chunk(b"a", b"4")[:-1],
        b"\n" + chunk(b"a", b"4"),
        chunk(b"a", b"4").replace(b"null", b'"stop"'),
        chunk(b"a", b"4").replace(b'"index":0', b'"index":1'),
        b"data: [DONE]\n\n",
        b"",
    ],
)
def test_what_does_not_fit_is_left_to_the_decoder(raw: bytes) -> None:
    assert shape().read(raw) is None


@pytest.mark.parametrize(
    ("raw", "text", "usage"),
    [
        (chunk(b"a", b"3"), "b", Usage(5, 3)),
        (chunk(b"a", b"3"), "a", Usage(5, 4)),
        (chunk(b"a", b"3", rest=b',"details":{}'), "a", Usage(5, 3)),
        (HEAD + b'a","content":"a' + TAIL + PLAIN_END, "a", None),
        (chunk(b"a").replace(b"\n", b"\r\n"), "a", None),
    ],
)
def test_no_shape_is_learned_from_what_is_not_understood(raw: bytes, text: str, usage: Usage | None) -> None:
    assert ChunkShape.of(raw, text, usage, leaves_null=False) is None


@given(st.lists(st.tuples(st.text(max_size=8), st.integers(0, 30)), max_size=8), st.booleans(), st.booleans())
@example([("a", 1), ("b", 2), ("\u2028", 3), ("c", 3)], True, True)
def test_whatever_the_text_both_ways_agree(said: list[tuple[str, int]], counted: bool, cut: bool) -> None:
    """Text put into JSON raw: quotes, escapes and control characters as they fall."""
    reads = [
        chunk(text.encode("utf-8", "surrogatepass"), b"%d" % total if counted else None)
        for text, total in [("start", 1), *said]
    ]
    printable = all(text.isprintable() for text, _ in said)  # a decoder is stricter with others than we are
    if printable:
        assert metered(reads, shapes=True, cut=cut) == metered(reads, shapes=False, cut=cut)
    assert metered(reads, shapes=True, cut=cut)[0] == metered(reads, shapes=False, cut=cut)[0]
