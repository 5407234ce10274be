"""Dialects with named events: bytes unchanged at every split, tokens, usage and ends noticed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from support.transcripts import load
from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.dialects import DIALECTS, Dialect, Meter, dialect_of
from tokenflow_gateway.relay.errors import (
    BadRequest,
    EngineUnreachable,
    MethodNotAllowed,
    NoEngine,
    NotServed,
)
from tokenflow_gateway.relay.request import Body, parse_object, read_reader
from tokenflow_gateway.relay.routes import check_route, response_of, route_of

MESSAGES, RESPONSES = DIALECTS["/v1/messages"], DIALECTS["/v1/responses"]
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def body_of(fields: dict[str, object]) -> Body:
    return parse_object(json.dumps(fields).encode())


def meter_of(dialect: Dialect) -> tuple[Meter, ReaderTrack]:
    track = ReaderTrack(reader="human", declared_rate=None, now=0.0)
    fields = dialect.read_fields(body_of({"stream": True}))
    return dialect.meter(track, fields, max_event_bytes=1 << 20, sglang=True), track


def event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def text(words: str) -> bytes:
    return event("content_block_delta", index=0, delta={"type": "text_delta", "text": words})


def said(words: str, number: int = 4) -> bytes:
    return event("response.output_text.delta", delta=words, sequence_number=number)


# ---- recordings, cut everywhere -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "deltas", "usage", "failed"),
    [
        ("messages_stream", 7, (37, 8), False),
        ("messages_stream_length", 12, (35, 12), False),
        ("messages_stream_tools", 0, (34, 60), False),
        ("responses_stream", 3, (37, 3), True),
        ("responses_stream_completed", 7, (37, 8), False),
        ("responses_stream_incomplete", 10, (35, 10), False),
    ],
)
def test_a_recording_passes_unchanged_and_counted_at_every_split(
    name: str, deltas: int, usage: tuple[int, int], *, failed: bool
) -> None:
    transcript = load(name)
    data, dialect = transcript.data, dialect_of(transcript.path)
    for cut in range(len(data) + 1):
        meter, track = meter_of(dialect)
        out = meter.feed(data[:cut]) + meter.feed(data[cut:])
        assert out == data, f"cut at {cut}"
        assert (meter.done, meter.failed, meter.settled) == (True, failed, True)
        assert meter.usage is not None
        assert (meter.usage.prompt_tokens, meter.usage.completion_tokens) == usage
        assert (meter.tokens, meter.readable, track.shape.tokens) == (usage[1], deltas, deltas)


@pytest.mark.parametrize("name", ["messages_stream", "responses_stream"])
@pytest.mark.parametrize("change", [b"\r\n", b"\r"])
def test_other_line_ends_pass_as_they_came(name: str, change: bytes) -> None:
    transcript = load(name)
    data = transcript.data.replace(b"\n", change)
    meter, _ = meter_of(dialect_of(transcript.path))
    out = b"".join(meter.feed(data[at : at + 1]) for at in range(len(data))) + meter.end()
    assert out.rstrip() == data.rstrip()
    assert meter.done


@pytest.mark.parametrize("name", ["messages_stream", "responses_stream"])
def test_a_recording_that_is_cut_short_is_not_whole(name: str) -> None:
    transcript = load(name)
    events = transcript.data.split(b"\n\n")
    for kept in range(len(events) - 3):
        meter, _ = meter_of(dialect_of(transcript.path))
        meter.feed(b"\n\n".join(events[:kept]) + b"\n\nevent: content_bl")
        assert meter.end() == b"", "half an event is not passed on"
        assert (meter.done, meter.complete, meter.failed) == (False, False, False), kept


def test_each_piece_brings_its_tokens() -> None:
    meter, _ = meter_of(MESSAGES)
    pieces = meter.pieces(event("message_start", message={}) + text("Par") + text("is"))
    assert [(piece.tokens, piece.readable) for piece in pieces] == [(0, 0), (1, 1), (2, 2)]


# ---- messages ---------------------------------------------------------------------------------------


def test_what_nobody_reads_counts_as_hidden() -> None:
    meter, track = meter_of(MESSAGES)
    for delta in ({"type": "thinking_delta", "thinking": "hm"}, {"partial_json": "{"}, {"text": "Yes"}):
        meter.feed(event("content_block_delta", delta=delta))
    meter.feed(event("content_block_delta", delta={"type": "signature_delta", "signature": "x"}))
    assert (meter.tokens, track.shape.tokens) == (3, 1)
    assert track.consumed_tokens(track.estimate(0.0)) == 2


def test_cached_prompt_tokens_are_prompt_tokens() -> None:
    meter, _ = meter_of(MESSAGES)
    meter.feed(event("message_start", message={"usage": {"input_tokens": 3, "cache_read_input_tokens": 30}}))
    meter.feed(event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 5}))
    assert meter.usage is not None
    assert (meter.usage.prompt_tokens, meter.usage.completion, meter.settled) == (33, 5, True)


def test_only_the_stop_may_be_missing_from_a_message() -> None:
    meter, _ = meter_of(MESSAGES)
    meter.feed(text("a") + event("message_delta", delta={"stop_reason": "end_turn"}))
    assert (meter.complete, meter.done, meter.ending) == (True, False, STOP)
    meter.feed(STOP)
    assert meter.done
    assert meter.feed(b"data: [DONE]\n\n" + text("b")) == b"", "nothing follows the end"


def test_an_error_inside_a_message_is_noticed_and_ends_as_it_did() -> None:
    meter, _ = meter_of(MESSAGES)
    error = event("error", error={"type": "overloaded_error", "message": "m"})
    assert meter.feed(text("a") + error) == text("a") + error
    assert (meter.failed, meter.ending) == (True, b"")
    assert meter.feed(STOP) == STOP


@pytest.mark.parametrize("dialect", [MESSAGES, RESPONSES])
def test_an_error_without_a_name_gets_one(dialect: Dialect) -> None:
    meter, _ = meter_of(dialect)
    out = meter.feed(b'data: {"error": {"object": "error", "message": "boom", "code": 400}}\n\n')
    name, data = out.decode().rstrip().split("\n")
    assert (name, meter.failed) == ("event: error", True)
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["message"]) == ("error", "boom")


@pytest.mark.parametrize("dialect", [MESSAGES, RESPONSES])
def test_comments_go_and_what_is_not_known_stays(dialect: Dialect) -> None:
    meter, _ = meter_of(dialect)
    odd = (
        event("new.thing", delta=[1])
        + event("ping")
        + b"data: words\n\n"
        + b'data: {"type": 3}\n\ndata: []\n\n'
    )
    assert meter.feed(b": processing\n\n" + odd + b"id: 3\n\n") == odd
    assert (meter.tokens, meter.failed, meter.done) == (0, False, False)


def test_an_end_of_an_unknown_shape_is_still_the_end() -> None:
    meter, _ = meter_of(RESPONSES)
    meter.feed(event("response.completed", response=[], sequence_number="9"))
    assert (meter.done, meter.failed) == (True, False)


# ---- responses --------------------------------------------------------------------------------------


def test_only_text_and_refusals_are_read() -> None:
    meter, track = meter_of(RESPONSES)
    for kind in ("reasoning_text", "function_call_arguments", "output_text", "refusal"):
        meter.feed(event(f"response.{kind}.delta", delta="x"))
    meter.feed(event("response.output_text.delta", delta="") + event("response.output_text.done", text="x"))
    assert (meter.tokens, track.shape.tokens) == (4, 2)


@pytest.mark.parametrize(
    ("kind", "failed"),
    [
        ("response.completed", False),
        ("response.incomplete", False),
        ("response.failed", True),
        ("error", True),
    ],
)
def test_a_response_ends_in_four_ways(kind: str, *, failed: bool) -> None:
    meter, _ = meter_of(RESPONSES)
    meter.feed(said("a"))
    usage = {"input_tokens": 7, "output_tokens": 4}
    meter.feed(event(kind, response={"usage": usage}, sequence_number=5))
    assert (meter.done, meter.failed, meter.tokens, meter.sequence) == (True, failed, 4, 6)


def test_an_error_event_goes_on_with_the_numbers_and_suits_both_kinds_of_sdk() -> None:
    meter, _ = meter_of(RESPONSES)
    meter.feed(said("a", 8))
    raw = RESPONSES.error_events(EngineUnreachable("gone"), sequence=meter.sequence)
    told = json.loads(raw.decode().split("\ndata: ")[1])
    assert (told["type"], told["message"], told["code"], told["sequence_number"]) == (
        "error",
        "gone",
        "engine_connection_lost",
        9,
    )
    assert told["error"]["message"] == "gone"


# ---- what engines are asked ---------------------------------------------------------------------------


def test_a_message_leaves_as_it_came_and_is_named_beside_it() -> None:
    body = b'{ "model": "m", "max_tokens":1e1, "messages": []}'
    assert MESSAGES.upstream_body(body, parse_object(body), rid="tf-1", stream=True) is body
    assert MESSAGES.upstream_headers("tf-1") == [(b"x-override-rid", b"tf-1")]
    assert MESSAGES.upstream_headers(None) == []


def test_a_response_is_named_in_its_body_as_a_response_is() -> None:
    body = b'{"model":"m","input":"x","request_id":"mine"}'
    sent = json.loads(RESPONSES.upstream_body(body, parse_object(body), rid="resp_1", stream=True))
    assert sent == {"model": "m", "input": "x", "request_id": "resp_1"}
    assert RESPONSES.rid_prefix == "resp_"


def test_a_response_of_an_engine_that_is_told_no_names_has_none_of_its_clients() -> None:
    body = b'{"model":"m","input":"x","request_id":"mine"}'
    sent = json.loads(RESPONSES.upstream_body(body, parse_object(body), rid=None, stream=True))
    assert sent == {"model": "m", "input": "x"}
    plain = b'{ "model":"m","input":"x" }'
    assert RESPONSES.upstream_body(plain, parse_object(plain), rid=None, stream=True) is plain


def test_what_a_response_goes_on_from_is_read() -> None:
    read = RESPONSES.read_fields
    assert read(body_of({"previous_response_id": "resp_1"})).continues == "resp_1"
    assert read(body_of({"previous_response_id": None})).continues is None
    assert read(body_of({})).continues is None
    with pytest.raises(BadRequest, match="previous_response_id"):
        read(body_of({"previous_response_id": 1}))
    with pytest.raises(BadRequest, match="more than once"):
        parse_object(b'{"previous_response_id": "a", "previous_response_id": "b"}')


@pytest.mark.parametrize(
    ("status", "pending"),
    [("queued", True), ("in_progress", True), ("completed", False), ("cancelled", False), (None, False)],
)
def test_a_response_that_the_engine_goes_on_with_says_so(status: str | None, *, pending: bool) -> None:
    read = RESPONSES.document(json.dumps({"id": "resp_1", "status": status, "usage": None}).encode())
    assert (read.response_id, read.is_pending) == ("resp_1", pending)
    assert not MESSAGES.document(b'{"id":"msg_1","type":"message"}').is_pending


@pytest.mark.parametrize(
    ("dialect", "body", "user"),
    [
        (MESSAGES, {"metadata": {"user_id": "ann"}, "user": "bob"}, "ann"),
        (MESSAGES, {"metadata": 3, "user": "bob"}, None),
        (MESSAGES, {}, None),
        (RESPONSES, {"user": "bob", "metadata": {"user_id": "ann"}}, "bob"),
    ],
)
def test_who_reads_is_named_where_the_dialect_has_it(
    dialect: Dialect, body: dict[str, object], user: str | None
) -> None:
    assert read_reader([], dialect.user(body_of(body)), user_header="X-TokenFlow-User").user == user


# ---- documents and errors -------------------------------------------------------------------------------


def test_documents_are_counted_by_their_usage() -> None:
    read = MESSAGES.document(b'{"type":"message","usage":{"input_tokens":2,"output_tokens":9}}')
    assert read.usage is not None
    assert (read.usage.prompt_tokens, read.usage.completion) == (2, 9)
    assert RESPONSES.document(b'{"status":"completed","usage":null}').usage is None
    assert RESPONSES.document(b"{").usage is None


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_have_anthropics_shape_where_anthropics_clients_are(path: str) -> None:
    dialect = dialect_of(path)
    told = json.loads(dialect.error_body(NoEngine("gone")))
    assert (told["type"], told["error"]["type"], told["error"]["message"]) == (
        "error",
        "overloaded_error",
        "gone",
    )
    kept = b'{"type": "error","error":{"type":"api_error","message":"m"}}'
    assert dialect.refusal(kept, 500) is kept
    flat = json.loads(dialect.refusal(b'{"object":"error","message":"m","code":400}', 400))
    assert (flat["type"], flat["error"]["type"], flat["error"]["message"]) == (
        "error",
        "invalid_request_error",
        "m",
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/files"])
def test_errors_have_openais_shape_elsewhere(path: str) -> None:
    events = dialect_of(path).error_events(EngineUnreachable("gone")).decode().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["error"]["message"] == "gone"
    assert events[1:] == ["data: [DONE]", ""]


# ---- routes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
    ],
)
def test_what_is_served(method: str, path: str) -> None:
    check_route(method, path)


@pytest.mark.parametrize(
    ("method", "path", "refusal"),
    [
        ("POST", "/v1/files", NotServed),
        ("GET", "/v1/batches/b_1", NotServed),
        ("POST", "/v1/chat/completions/", NotServed),
        ("POST", "/v1/responses/a/b/cancel", NotServed),
        ("POST", "/v1/../generate", NotServed),
        ("GET", "/v1/chat/completions", MethodNotAllowed),
        ("PUT", "/v1/responses/resp_1", MethodNotAllowed),
    ],
)
def test_what_is_not_served(method: str, path: str, refusal: Callable[..., Exception]) -> None:
    with pytest.raises(refusal):  # type: ignore[call-overload]
        check_route(method, path)


def test_routes_have_few_names() -> None:
    assert (
        route_of("/v1/responses/resp_1") == route_of("/v1/responses/resp_2") == "/v1/responses/{response_id}"
    )
    assert route_of("/v1/responses/resp_1/cancel") == "/v1/responses/{response_id}/cancel"
    assert route_of("/v1/nothing") is None


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses/cancel", "cancel"),
        ("/v1/responses", None),
        ("/v1/responses/..", None),
        ("/v1/embeddings", None),
    ],
)
def test_a_path_may_name_a_response(path: str, named: str | None) -> None:
    assert response_of(path) == named
