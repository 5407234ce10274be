"""What fits a shape, and near misses. `test_express.py` has the rest: that it means what a decoder says."""

from __future__ import annotations

import pytest

from tokenflow_gateway.relay.chunk_shape import MOST_EVENT_BYTES, ChunkShape, Passed, framed
from tokenflow_gateway.relay.usage import Usage

HEAD = b'data: {"id":"1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"'
TAIL = b'"},"finish_reason":null}]'
PLAIN_END = b"}\n\n"


def chunk(text: bytes, completion: bytes | None = None, *, rest: bytes = b"") -> bytes:
    usage = b""
    if completion is not None:
        usage = b',"usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":%b%b}' % (completion, rest)
    return HEAD + text + TAIL + usage + PLAIN_END


def shape(text: str = "a", completion: int | None = 3, *, cut_usage: bool = True) -> ChunkShape:
    usage = None if completion is None else Usage(5, completion)
    raw = chunk(text.encode(), None if completion is None else b"%d" % completion)
    made = ChunkShape.of(raw, text, usage, cut_usage=cut_usage, leaves_null=False)
    assert made is not None
    return made


def read(made: ChunkShape, raw: bytes) -> Passed | None:
    """`raw` as an HTTP chunk, by its own length."""
    return made.read(b"%x\r\n%b\r\n" % (len(raw), raw))


def test_a_chunk_that_fits_is_read_and_cut() -> None:
    raw = chunk(b"tok\xc3\xa9n", b"4")
    assert read(shape(), raw) == (framed(chunk(b"tok\xc3\xa9n")), "tokén", 4)
    assert read(shape(cut_usage=False), raw) == (framed(raw), "tokén", 4)
    assert read(shape(completion=None), chunk(b"token")) == (framed(chunk(b"token")), "token", 0)


def test_only_what_is_one_whole_http_chunk_fits() -> None:
    made, raw = shape(), chunk(b"a", b"4")
    whole = framed(raw)
    assert made.read(whole) is not None
    for at in range(len(whole)):
        assert made.read(whole[:at]) is None
        assert made.read(whole[at + 1 :]) is None
        assert made.read(whole[:at] + b"#" + whole[at + 1 :]) is None or whole[:at].endswith(b'"content":"')
    assert made.read(whole + whole) is None
    assert made.read(b"0" + whole) is None
    long = chunk(b"a" * MOST_EVENT_BYTES, b"4")
    assert made.read(b"%x\r\n%b\r\n" % (len(long), long)) is None


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
    assert read(shape(), raw) is None


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
    assert ChunkShape.of(raw, text, usage, cut_usage=True, leaves_null=False) is None
