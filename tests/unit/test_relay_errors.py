"""Errors come out in OpenAI's shape, whatever shape they came in."""

from __future__ import annotations

import json

import pytest

from tokenflow_gateway.relay.errors import (
    EngineUnreachable,
    NoEngine,
    error_events,
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


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_an_error_ends_a_stream_in_the_form_sdks_raise(route: str) -> None:
    events = error_events(route, EngineUnreachable("gone")).decode().split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["error"]["message"] == "gone"
    assert events[1:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses"])
def test_other_dialects_get_their_own_error_event(route: str) -> None:
    name, data = error_events(route, NoEngine("gone")).decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["type"] == "error"
