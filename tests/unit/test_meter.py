"""The meter: bytes through unchanged, what must differ changed, tokens and ends noticed."""

from __future__ import annotations

import json

import pytest

from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.meter import StreamMeter


def chunk(content: str | None = None, finish: str | None = None, index: int = 0, **delta: object) -> bytes:
    choice = {"index": index, "delta": {**delta, "content": content}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}\n\n'
DONE = b"data: [DONE]\n\n"


def meter(*, keep_usage: bool = False) -> StreamMeter:
    track = ReaderTrack(reader="human", declared_rate=None, now=0.0)
    return StreamMeter(track, max_event_bytes=1 << 20, keep_usage=keep_usage)


def test_events_pass_as_they_came_and_are_counted() -> None:
    stream = meter()
    sent = chunk("", role="assistant") + chunk("Par") + chunk("is") + chunk(None, "stop")
    assert stream.feed(sent) + stream.feed(DONE) == sent + DONE
    assert (stream.tokens, stream.done, stream.complete, stream.failed) == (2, True, True, False)


@pytest.mark.parametrize("keep_usage", [True, False])
def test_the_usage_event_reaches_only_those_who_asked(*, keep_usage: bool) -> None:
    stream = meter(keep_usage=keep_usage)
    assert stream.feed(chunk("a") + USAGE) == chunk("a") + (USAGE if keep_usage else b"")
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (5, 2)


def test_usage_beside_content_is_never_removed() -> None:
    stream = meter()
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"completion_tokens":1}}\n\n'
    assert stream.feed(event) == event
    assert (stream.tokens, stream.usage and stream.usage.completion_tokens) == (1, 1)


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_all_kinds_of_content_count(delta: dict[str, object]) -> None:
    stream = meter()
    stream.feed(chunk(None, **delta))
    assert stream.tokens == 1


def test_text_completions_count() -> None:
    stream = meter()
    stream.feed(b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n')
    assert stream.tokens == 1


def test_a_stream_is_complete_when_every_choice_is() -> None:
    stream = meter()
    stream.feed(chunk("a", index=0) + chunk("b", index=1) + chunk(None, "stop", index=0))
    assert not stream.complete
    stream.feed(chunk(None, "length", index=1))
    assert stream.complete


def test_nothing_follows_done() -> None:
    stream = meter()
    assert stream.feed(chunk("a") + DONE + DONE + chunk("b")) == chunk("a") + DONE
    assert stream.feed(chunk("c")) + stream.end() == b""


def test_text_that_reads_like_the_end_is_not_the_end() -> None:
    stream = meter()
    event = chunk("data: [DONE]")
    assert stream.feed(event) == event
    assert not stream.done


@pytest.mark.parametrize("event", [b"data: [DO\ndata: NE]\n\n", b": [DONE]\n\n"])
def test_what_is_not_the_whole_data_of_one_event_is_not_the_end(event: bytes) -> None:
    stream = meter()
    stream.feed(event)
    assert not stream.done


def test_done_without_its_blank_line_is_done() -> None:
    stream = meter()
    stream.feed(b"data: [DONE]")
    assert stream.end() == DONE
    assert stream.done


def test_half_an_event_is_not_passed_on_at_the_end() -> None:
    stream = meter()
    assert stream.feed(chunk("a") + b'data: {"choices":[{"ind') == chunk("a")
    assert stream.end() == b""


def test_comments_and_events_without_data_are_dropped() -> None:
    stream = meter()
    noise = b": processing\n\n" + b"retry: 1000\n\n" + b"id: 3\n\n"
    assert stream.feed(noise + chunk("a") + noise) == chunk("a")


def test_a_wrapped_error_passes_and_a_flat_one_is_wrapped() -> None:
    wrapped = b'data: {"error":{"message":"m","type":"t","param":null,"code":null}}\n\n'
    stream = meter()
    assert stream.feed(wrapped) == wrapped + DONE
    assert stream.failed
    flat = meter()
    out = flat.feed(b'data: {"object":"error","message":"m","code":500}\n\n')
    assert json.loads(out.removeprefix(b"data: ").removesuffix(DONE))["error"]["message"] == "m"
    assert flat.failed


def test_events_that_are_not_understood_pass() -> None:
    stream = meter()
    odd = b'data: {"choices": 3}\n\n' + b"data: plain words\n\n"
    assert stream.feed(odd) == odd
    assert stream.tokens == 0


@pytest.mark.parametrize(
    ("came", "leaves"),
    [
        (b'id: 7\nretry: 1\ndata: {"choices":[]}\n\n', b'data: {"choices":[]}\n\n'),
        (b'event: x\ndata: {"choices": 3}\n\n', b'data: {"choices": 3}\n\n'),
        (b': c\ndata:{"choices":[]}\r\n\r\n', b'data: {"choices":[]}\n\n'),
        (b'\n\ndata: {"choices":\ndata: []}\n\n', b'data: {"choices": []}\n\n'),
        (b"data: two\rdata: words\r\r: c\n\n", b"data: two\ndata: words\n\n"),
        (b"data: \n\ndata\n\ndata:  \n\nevent: x\n\nretry: 1\n\n", b""),
        (b"event: end\ndata:  [DONE] \r\n\r\n", DONE),
    ],
)
def test_what_some_client_cannot_read_leaves_as_plain_data(came: bytes, leaves: bytes) -> None:
    stream = meter()
    assert stream.feed(came) + stream.end() == leaves


def test_an_error_is_the_end() -> None:
    """Whatever an engine sends behind it, and whether or not it says so."""
    error = b'data: {"error":{"message":"m","type":"t","param":null,"code":null}}\n\n'
    stream = meter()
    assert stream.feed(chunk("a") + error + chunk("b") + error + DONE) == chunk("a") + error + DONE
    assert (stream.feed(chunk("c")), stream.tokens, stream.done, stream.failed) == (b"", 1, True, True)


def test_a_request_that_the_engine_gave_up_does_not_end_as_if_all_were_well() -> None:
    stream = meter()
    assert stream.feed(chunk("a") + chunk(None, "abort") + DONE) == chunk("a")
    assert stream.aborted
    assert not stream.done


def test_usage_of_another_shape_is_still_usage() -> None:
    stream = meter()
    event = b'data: {"choices":[],"usage":{"prompt_tokens":null,"completion_tokens":2.0}}\n\n'
    assert stream.feed(event) == b""
    assert stream.usage is not None


def test_an_error_in_words_is_wrapped() -> None:
    stream = meter()
    out = stream.feed(b'data: {"error":"boom"}\n\n')
    assert json.loads(out[6:].removesuffix(DONE))["error"]["message"] == "boom"
    assert stream.failed


def test_events_nested_without_end_pass() -> None:
    event = b'data: {"choices":' + b"[" * 5000 + b"]" * 5000 + b"}\n\n"
    assert meter().feed(event) == event


# ---- exact counts: usage in each chunk ------------------------------------------------------------


def exact(content: str | None, tokens: int, index: int = 0, **delta: object) -> bytes:
    """A chunk of an engine that was asked for usage with each: the total of its choice so far."""
    plain = chunk(content, None, index, **delta)
    return plain.replace(b"}\n\n", b',"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\n' % tokens)


def exact_meter() -> tuple[StreamMeter, ReaderTrack]:
    track = ReaderTrack(reader="human", declared_rate=None, now=0.0)
    return StreamMeter(track, max_event_bytes=1 << 20, keep_usage=False, cut_usage=True), track


def test_an_event_counts_for_all_its_tokens() -> None:
    stream, track = exact_meter()
    assert stream.feed(exact("a b c", 3) + exact("d", 4)) == chunk("a b c") + chunk("d")
    assert (stream.tokens, stream.readable, track.shape.tokens, stream.settled) == (4, 4, 4, False)


def test_choices_are_counted_one_by_one() -> None:
    stream, _ = exact_meter()
    stream.feed(exact("a", 1) + exact("x y", 2, index=1) + exact("b", 2) + exact("z", 3, index=1))
    assert stream.tokens == 5


def test_reasoning_and_text_of_one_step_share_its_tokens() -> None:
    stream, track = exact_meter()
    stream.feed(exact(None, 4, reasoning_content="so it is") + exact("Yes", 4) + exact(", yes", 6))
    assert stream.tokens == 6
    assert track.shape.tokens == 3  # the first text is a token, whoever has counted it


def test_what_ends_the_text_is_nobodys_to_read() -> None:
    stream, track = exact_meter()
    final = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n'
    stream.feed(exact("a", 1) + exact("b", 2) + chunk(None, "stop") + final)
    assert (stream.tokens, stream.readable, stream.settled) == (3, 2, True)
    track.delivered([2], [1.0])
    assert track.consumed_tokens(track.estimate(1e6)) == 3


def test_an_engine_that_ignores_the_wish_is_counted_by_events() -> None:
    stream, _ = exact_meter()
    stream.feed(chunk("a b c") + chunk("d"))
    assert stream.tokens == 2


def test_pieces_tell_what_the_client_has_with_each() -> None:
    stream, _ = exact_meter()
    hidden = exact(None, 2, reasoning_content="hm hm")
    pieces = stream.pieces(hidden + exact("a b", 4) + exact("c", 5))
    assert [piece.data for piece in pieces][1:] == [chunk("a b"), chunk("c")]
    assert [(piece.tokens, piece.readable) for piece in pieces] == [(2, 0), (4, 2), (5, 3)]


def test_an_error_that_is_false_is_none() -> None:
    stream = meter()
    event = b'data: {"error":false,"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    assert stream.feed(event) == event
    assert (stream.tokens, stream.failed, stream.done) == (1, False, False)
