"""What the relay reads of a request and what it changes."""

from __future__ import annotations

import json

import pytest

from tokenflow_gateway.relay.errors import BadRequest
from tokenflow_gateway.relay.request import parse_object, read_fields, upstream_body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"a": ', "not valid JSON: Input data was truncated"),
        (b'{"a": 1,}', "byte"),
        (b"[1]", "must be a JSON object"),
        (b'{"a": "\xff"}', "not valid JSON"),
    ],
)
def test_a_bad_body_says_what_is_wrong(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_object(body)


@pytest.mark.parametrize(
    ("parsed", "param"),
    [({"model": 3}, "model"), ({"stream": "yes"}, "stream"), ({"stream_options": []}, "stream_options")],
)
def test_a_wrong_type_names_its_field(parsed: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read_fields(parsed)
    assert raised.value.param == param


def test_fields_have_openais_defaults() -> None:
    fields = read_fields({})
    assert (fields.model, fields.stream, fields.wants_usage) == (None, False, False)
    assert read_fields({"stream": None, "stream_options": None}).stream is False
    assert read_fields({"stream_options": {"include_usage": True}}).wants_usage


def test_everything_else_of_the_body_is_kept() -> None:
    body = {
        "model": "m",
        "stream": True,
        "unknown": {"deep": [1, 2.5, "ü", None]},
        "rid": "mine",
        "seed": 2**60,
    }
    sent = json.loads(upstream_body(body, rid="tf-1", stream=True))
    assert sent == {**body, "rid": "tf-1", "stream_options": {"include_usage": True}}


def test_stream_options_of_the_client_are_kept_beside_ours() -> None:
    body = {"stream_options": {"include_usage": False, "continuous_usage_stats": True}}
    sent = json.loads(upstream_body(body, rid=None, stream=True))
    assert sent == {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def test_a_plain_request_to_another_engine_is_not_touched() -> None:
    assert json.loads(upstream_body({"model": "m", "rid": "mine"}, rid=None, stream=False)) == {"model": "m"}
