"""What the relay reads of a request and what it changes."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from tokenflow_gateway.relay.errors import BadRequest
from tokenflow_gateway.relay.request import (
    Body,
    parse_object,
    read_delivery,
    read_fields,
    read_reader,
    upstream_body,
)


def body_of(fields: dict[str, object]) -> Body:
    return parse_object(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", r"not valid JSON: Input data was truncated at line 1, column 1 \(byte 0\)"),
        (b'{"a": ', r"not valid JSON: Input data was truncated at line 1, column 7 \(byte 6\)"),
        (b'{"a": 1,}', r"trailing comma in object at line 1, column 9 \(byte 8\)"),
        (b'{\n "a": 1,\n "b" 2\n}', r"expected ':' at line 3, column 6 \(byte 16\)"),
        (b'{"\xff": 1}', "Invalid UTF-8 encoded string at line 1"),
        (b'{"a": 1} x', r"trailing characters at line 1, column 11 \(byte 10\)"),
        (b"[1]", "must be a JSON object"),
        (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
    ],
)
def test_a_bad_body_says_what_is_wrong(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_object(body)


@pytest.mark.parametrize(
    ("parsed", "param"),
    [
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_a_wrong_type_names_its_field(parsed: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read_fields(body_of(parsed))
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"stream":true,"x":{},"stream":false}', "stream"),
        (b'{"model":"a", "messages":[], "model" : "b"}', "model"),
        (b'{"stream":true,"str\\u0065am":false}', None),
        (b'{"model":"a","tools":[{"model":"b"}]}', None),
        (b'{"model":"a","x":1,"x":2}', None),
        (b'{"model":"a","x":"\xff","model":"b"}', "model"),
        (b'{"x":{"model":"a"},"model":"b","y":["model"]}', None),
        (b'{"x":{"model":"a"},"model":"b","x":0}', "model"),
    ],
)
def test_a_field_that_is_read_is_there_once(body: bytes, param: str | None) -> None:
    """What the gateway does not read is not its business, and of escaped names the last one counts."""
    if param is None:
        parse_object(body)
        return
    with pytest.raises(BadRequest, match="more than once") as raised:
        parse_object(body)
    assert raised.value.param == param


def test_fields_have_openais_defaults() -> None:
    fields = read_fields(body_of({}))
    assert (fields.model, fields.stream, fields.wants_usage) == (None, False, False)
    assert read_fields(body_of({"stream": None, "stream_options": None})).stream is False
    assert read_fields(body_of({"stream_options": {"include_usage": True}})).wants_usage


def test_everything_else_of_the_body_is_kept() -> None:
    body = {
        "model": "m",
        "stream": True,
        "unknown": {"deep": [1, 2.5, "ü", None]},
        "rid": "mine",
        "seed": 2**60,
    }
    sent = json.loads(upstream_body(body_of(body), rid="tf-1", stream=True))
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert sent == {**body, "rid": "tf-1", "stream_options": options}


def test_stream_options_of_the_client_are_kept_beside_ours() -> None:
    body = {"stream_options": {"include_usage": False, "continuous_usage_stats": True}}
    sent = json.loads(upstream_body(body_of(body), rid=None, stream=True))
    assert sent == {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def test_a_plain_request_to_another_engine_is_not_touched() -> None:
    assert json.loads(upstream_body(body_of({"model": "m", "rid": "mine"}), rid=None, stream=False)) == {
        "model": "m"
    }


def test_what_is_not_looked_at_leaves_byte_for_byte() -> None:
    """Numbers that JSON libraries change, keys given twice inside, spaces: none of our business."""
    odd = b'{"model":"m","x": {"a": 1e400, "a":1.0, "b":[ 1 ,2]}}'
    assert b'{"a": 1e400, "a":1.0, "b":[ 1 ,2]}' in upstream_body(parse_object(odd), rid="r", stream=True)


def test_a_large_body_of_small_things_is_not_built() -> None:
    """Nine million empty objects would take half a gigabyte and seconds of the event loop."""
    body = b'{"model":"m","x":[' + b"{}," * 1_300_000 + b"{}]}"
    tracemalloc.start()
    try:
        parsed = parse_object(body)
        read_fields(parsed)
        assert tracemalloc.get_traced_memory()[1] < len(body) * 2
    finally:
        tracemalloc.stop()


def user_of(
    body: dict[str, object], *headers: tuple[bytes, bytes], named: str = "X-TokenFlow-User"
) -> str | None:
    return read_reader(headers, body_of(body).get("user"), user_header=named).user


def test_the_header_names_the_reader_or_else_the_body_does() -> None:
    header = (b"x-tokenflow-user", b"ann")
    assert user_of({"user": "bob"}, header) == "ann"
    assert user_of({"user": "bob"}) == "bob"
    assert user_of({"user": "bob"}, (b"x-tokenflow-user", b"")) == "bob"
    assert user_of({}) is None


def test_only_the_configured_header_names_the_reader() -> None:
    header = (b"x-openwebui-user-id", b"ann")
    assert user_of({}, header) is None
    assert user_of({}, header, named="X-OpenWebUI-User-Id") == "ann"


@pytest.mark.parametrize("user", [3, None, ["ann"], "", "x" * 257, "x" * 100_000])
def test_a_user_that_cannot_be_one_is_the_engines_to_judge(user: object) -> None:
    assert not user_of({"user": user})
    assert json.loads(upstream_body(body_of({"user": user}), rid=None, stream=False)) == {"user": user}


def test_a_name_is_the_same_in_header_and_body() -> None:
    assert user_of({"user": "Zoë"}) == user_of({}, (b"x-tokenflow-user", "Zoë".encode()))


def test_a_header_that_is_too_long_is_refused() -> None:
    with pytest.raises(BadRequest, match="at most 256"):
        user_of({}, (b"x-tokenflow-user", b"x" * 257))


def test_only_sglang_is_asked_for_usage_in_each_chunk() -> None:
    asked = {"stream_options": {"continuous_usage_stats": True, "x": 1}}
    sent = json.loads(upstream_body(body_of({}), rid=None, stream=True))
    assert sent["stream_options"] == {"include_usage": True}
    assert read_fields(body_of(asked)).wants_usage_in_chunks
    assert not read_fields(body_of({"stream_options": {}})).wants_usage_in_chunks
    kept = json.loads(upstream_body(body_of(asked), rid=None, stream=True))
    assert kept["stream_options"] == {**asked["stream_options"], "include_usage": True}


def test_delivery_is_immediate_or_paced_and_nothing_else() -> None:
    assert read_delivery([]) == read_delivery([(b"x-tokenflow-delivery", b"immediate")]) == "immediate"
    assert read_delivery([(b"x-tokenflow-delivery", b"paced")]) == "paced"
    with pytest.raises(BadRequest, match="immediate, paced, not 'Paced'"):
        read_delivery([(b"x-tokenflow-delivery", b"Paced")])
