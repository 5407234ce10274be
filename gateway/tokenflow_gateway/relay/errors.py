"""Every failure a client can see, in OpenAI's shape, before the answer has begun or in the middle of it.

RelayError
├── BadRequest (400)          the body cannot be used
├── BodyTooLarge (413)
├── RequestTooSlow (408)      the body did not come in time
├── ModelNotFound (404)
├── NotRelayed (404)          the engine sends the client elsewhere
├── NoEngine (503)            nobody there to ask; says when to retry
├── EngineUnreachable (502)   the engine refused or dropped the connection
├── EngineTimeout (504)       a phase took longer than its time-out
├── BadStream (502)           what the engine sends is no stream of events
├── EngineAborted (502)       the engine gave the request up of itself
├── StreamTruncated (502)     the engine's stream ended in the middle
├── ClientTooSlow (408)       the client does not take what the engine has sent
└── ShuttingDown (503)        the gateway is going, and the grace is over
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

__all__ = [
    "BadRequest",
    "BadStream",
    "BodyTooLarge",
    "ClientTooSlow",
    "EngineAborted",
    "EngineTimeout",
    "EngineUnreachable",
    "ModelNotFound",
    "NoEngine",
    "NotRelayed",
    "RelayError",
    "RequestTooSlow",
    "ShuttingDown",
    "StreamTruncated",
    "error_body",
    "error_events",
    "normalise_error",
    "normalise_error_event",
]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}


class RelayError(Exception):
    """A failure with an HTTP status and an OpenAI error object."""

    status = 500
    code: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """The error as a JSON document."""
        return error_body(self.message, status=self.status, code=self.code, param=self.param)


class BadRequest(RelayError):
    status = 400
    code = "invalid_request"


class BodyTooLarge(RelayError):
    status = 413
    code = "request_too_large"


class ModelNotFound(RelayError):
    status = 404
    code = "model_not_found"


class RequestTooSlow(RelayError):
    status = 408
    code = "request_timeout"


class NotRelayed(RelayError):
    status = 404
    code = "not_found"


class NoEngine(RelayError):
    status = 503
    code = "engine_unavailable"
    retry_after_s = 2


class EngineUnreachable(RelayError):
    status = 502
    code = "engine_connection_lost"
    retry_after_s = 2


class EngineTimeout(RelayError):
    status = 504
    code = "engine_timeout"


class EngineAborted(RelayError):
    status = 502
    code = "engine_aborted"
    retry_after_s = 2


class BadStream(RelayError):
    status = 502
    code = "engine_bad_stream"


class StreamTruncated(RelayError):
    status = 502
    code = "stream_truncated"


class ClientTooSlow(RelayError):
    status = 408
    code = "client_too_slow"


class ShuttingDown(RelayError):
    status = 503
    code = "gateway_shutdown"
    retry_after_s = 2


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(message: str, *, status: int, code: str | None = None, param: str | None = None) -> bytes:
    """``{"error": {message, type, param, code}}`` as JSON."""
    error = {"message": message, "type": error_type(status), "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def error_events(route: str, error: RelayError) -> bytes:
    """`error` as the end of a stream that has begun, in the dialect of its route."""
    if route == "/v1/messages":
        detail = {"type": "api_error", "message": error.message}
        data = msgspec.json.encode({"type": "error", "error": detail})
        return b"event: error\ndata: " + data + b"\n\n"
    if route == "/v1/responses":
        data = msgspec.json.encode(
            {"type": "error", "code": error.code, "message": error.message, "param": None}
        )
        return b"event: error\ndata: " + data + b"\n\n"
    return b"data: " + error.body() + b"\n\ndata: [DONE]\n\n"


def normalise_error(body: bytes, status: int) -> bytes:
    """An engine's error answer in OpenAI's shape; returned as it came if it has that shape already.

    Known other shapes: SGLang's flat ``{"object": "error", ...}``, FastAPI's ``{"detail": ...}``, plain text.
    """
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body.decode("utf-8", "replace").strip()
        return error_body(text[:2000] or f"the engine answered {status}", status=status)
    if not isinstance(parsed, dict):
        return error_body(f"the engine answered {status}: {parsed}"[:2000], status=status)
    if isinstance(parsed.get("error"), dict):
        return body
    return _from_flat(parsed, status)


def normalise_error_event(data: bytes) -> bytes | None:
    """A flat error inside a stream, in OpenAI's shape; None if `data` is no flat error."""
    try:
        parsed = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(parsed, dict) or isinstance(parsed.get("error"), dict):
        return None
    code = parsed.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return _from_flat(parsed, status)


def _from_flat(parsed: dict[str, Any], status: int) -> bytes:
    code, param = parsed.get("code"), parsed.get("param")
    return error_body(
        _message_of(parsed, status),
        status=status,
        code=code if isinstance(code, str) else None,  # SGLang's repeats the status, OpenAI's is a word
        param=param if isinstance(param, str) else None,
    )


_SOURCE_LINE = re.compile(r'\s*File "[^"]*", line \d+.*', re.DOTALL)
"""Where SGLang's web framework saw a fault: paths of the engine's machine, of no use to a client."""


def _message_of(parsed: dict[str, Any], status: int) -> str:
    for key in ("message", "detail", "error"):
        value = parsed.get(key)
        if isinstance(value, str):
            return _SOURCE_LINE.sub("", value)
        if value:
            return msgspec.json.encode(value).decode()
    return f"the engine answered {status}"
