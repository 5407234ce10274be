"""Errors come out in OpenAI's shape, whatever shape they came in."""

from __future__ import annotations

import json

import pytest

from tokenflow_gateway.relay.errors import (
    EngineUnreachable,
    MethodNotAllowed,
    NoEngine,
    error_message,
    normalise_error,
    normalise_error_event,
)

FLAT = {"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (json.dumps(FLAT), 400, "too long"),
        ('{"detail": "Not Found"}', 404, "Not Found"),
        ('{"detail": [{"loc": ["body"], "msg": "missing"}]}', 422, '[{"loc":["body"],"msg":"missing"}]'),
        ('{"message": "1 error\\n\\n  File \\"/a/b.py\\", line 3, in f\\n  POST"}', 400, "1 error"),
        ("Internal Server Error", 500, "Internal Server Error"),
        ("", 502, "the engine answered 502"),
        ("[1]", 500, "the engine answered 500: [1]"),
        ('{"error": "plain words"}', 500, "plain words"),
        ("\udcff", 500, "\ufffd"),
    ],
)
def test_every_shape_becomes_openais(body: str, status: int, message: str) -> None:
    error = json.loads(normalise_error(body.encode("utf-8", "surrogateescape"), status))["error"]
    assert error["message"] == message
    assert set(error) == {"message", "type", "param", "code"}
    assert (
        error["type"]
        == {
            400: "invalid_request_error",
            404: "not_found_error",
            422: "invalid_request_error",
            500: "server_error",
            502: "server_error",
        }[status]
    )


def test_openais_shape_is_left_alone() -> None:
    body = b'{"error": {"message": "m", "type": "t", "param": null, "code": "c"} }'
    assert normalise_error(body, 400) is body


def test_a_flat_error_inside_a_stream_is_wrapped_and_others_are_left() -> None:
    wrapped = normalise_error_event(json.dumps(FLAT).encode())
    assert wrapped is not None
    assert json.loads(wrapped)["error"]["message"] == "too long"
    assert normalise_error_event(b'{"error": {"message": "m"}}') is None
    assert normalise_error_event(b"not json") is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"error": "words"}', "words"),
        (b'{"detail": "d"}', "d"),
        (b"[]", "the engine reported an error"),
        (b"{", "the engine reported an error"),
    ],
)
def test_an_error_of_any_form_says_something(data: bytes, message: str) -> None:
    assert error_message(data) == message


def test_an_error_brings_its_headers() -> None:
    assert NoEngine("gone").headers() == [(b"retry-after", b"2"), (b"x-tokenflow-reason", b"no_engine")]
    assert EngineUnreachable("lost").headers() == [(b"retry-after", b"2")]
    assert MethodNotAllowed("GET", "/x", ["POST", "PUT"]).headers() == [(b"allow", b"POST, PUT")]
