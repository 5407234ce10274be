"""Every failure a client can see, in OpenAI's shape, before the answer has begun or in the middle of it.

RelayError
├── BadRequest (400)          the body cannot be used
├── Unauthorized (401)        no key, or none that is valid here
├── Forbidden (403)           a valid key, but not for this
├── BodyTooLarge (413)
├── RequestTooSlow (408)      the body did not come in time
├── ModelNotFound (404)
├── ResponseNotFound (404)    no stored response of the tenant's
├── NotServed (404)          no route of the gateway's
├── MethodNotAllowed (405)
├── NotRelayed (404)          the engine sends the client elsewhere
├── RateLimited (429)         a limit of the tenant or key; says which, and when to retry
├── QueueFull (429)           too many wait for an engine
├── QueueTimeout (504)        no engine had room in time; a proxy that asks elsewhere after a 503 does not
├── NoEngine (503)            nobody there to ask; says when to retry
├── EngineUnreachable (502)   the engine refused or dropped the connection
├── PhaseTimeout (504)        a phase took longer than its time-out
│   ├── EngineTimeout         it was the engine's:
│   │   ├── ConnectTimeout    no connection to it
│   │   ├── FirstByteTimeout  nothing of its answer
│   │   └── IdleTimeout       nothing more of it
│   └── TotalTimeout          the request as a whole, whoever was slow
├── EngineRefused (its own)   the engine's error, where the answer has begun already
│   └── EngineFailed          the same as the first event of its stream
├── BadStream (502)           what the engine sends is no stream of events
├── EngineAborted (502)       the engine gave the request up of itself
├── StreamTruncated (502)     the engine's stream ended in the middle
├── ClientTooSlow (408)       the client does not take what the engine has sent
├── ShuttingDown (503)        the gateway is going: nothing new, or the grace is over
└── TooManyConnections (503)  of clients
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self

import msgspec

__all__ = [
    "BadRequest",
    "BadStream",
    "BodyTooLarge",
    "ClientTooSlow",
    "ConnectTimeout",
    "EngineAborted",
    "EngineFailed",
    "EngineRefused",
    "EngineTimeout",
    "EngineUnreachable",
    "FirstByteTimeout",
    "Forbidden",
    "IdleTimeout",
    "MethodNotAllowed",
    "ModelNotFound",
    "NoEngine",
    "NotRelayed",
    "NotServed",
    "PhaseTimeout",
    "QueueFull",
    "QueueTimeout",
    "RateLimited",
    "RelayError",
    "RequestTooSlow",
    "ResponseNotFound",
    "ShuttingDown",
    "StreamTruncated",
    "TooManyConnections",
    "TotalTimeout",
    "Unauthorized",
    "error_body",
    "error_message",
    "error_type",
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
    reason: str | None = None
    """In one word, for ``x-tokenflow-reason``."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """The error as a JSON document."""
        return error_body(self.message, status=self.status, code=self.code, param=self.param)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the answer says beside it."""
        told: list[tuple[bytes, bytes]] = []
        if self.retry_after_s is not None:
            told.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.reason is not None:
            told.append((b"x-tokenflow-reason", self.reason.encode()))
        return told


class BadRequest(RelayError):
    status = 400
    code = "invalid_request"


class Unauthorized(RelayError):
    status = 401
    code = "invalid_api_key"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"www-authenticate", b"Bearer")]


class Forbidden(RelayError):
    status = 403
    code = "permission_denied"


class BodyTooLarge(RelayError):
    status = 413
    code = "request_too_large"


class ModelNotFound(RelayError):
    status = 404
    code = "model_not_found"


class ResponseNotFound(RelayError):
    """Whether there is one of another tenant's is not said."""

    status = 404
    code = "response_not_found"

    def __init__(self, *, param: str) -> None:
        super().__init__("there is no response with this id", param=param)


class RequestTooSlow(RelayError):
    status = 408
    code = "request_timeout"


class NotServed(RelayError):
    status = 404
    code = "not_found"


class MethodNotAllowed(RelayError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: Iterable[str]) -> None:
        self._allowed = ", ".join(allowed)
        super().__init__(f"{method} is not a method of {path}: use {self._allowed}")

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"allow", self._allowed.encode())]


class NotRelayed(RelayError):
    status = 404
    code = "not_found"

    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"no such route: {method} {path}")


class RateLimited(RelayError):
    status = 429

    def __init__(self, message: str, *, reason: str, retry_s: float) -> None:
        """`retry_s` is infinite where waiting does not help."""
        super().__init__(message)
        self.code = "insufficient_quota" if reason == "budget" else "rate_limit_exceeded"
        self.reason = reason
        self._retry_s = retry_s
        if retry_s < math.inf:
            self.retry_after_s = max(1, math.ceil(retry_s))

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self._retry_s == math.inf:
            return [*super().headers(), (b"x-should-retry", b"false")]
        milliseconds = str(math.ceil(self._retry_s * 1000)).encode()
        return [*super().headers(), (b"retry-after-ms", milliseconds)]


class QueueFull(RelayError):
    status = 429
    code = "queue_full"
    retry_after_s = 2
    reason = "queue_full"

    def __init__(self, sla: str) -> None:
        super().__init__(f"too many requests of class {sla!r} wait for an engine")


class QueueTimeout(RelayError):
    status = 504
    code = "queue_timeout"
    retry_after_s = 2
    reason = "queue_timeout"

    def __init__(self, within_s: float) -> None:
        super().__init__(f"no engine had room for this request within {within_s:g} s")


class NoEngine(RelayError):
    status = 503
    code = "engine_unavailable"
    reason = "no_engine"
    retry_after_s = 2


class EngineUnreachable(RelayError):
    status = 502
    code = "engine_connection_lost"
    retry_after_s = 2


Phase = Literal["connect", "first_byte", "idle", "total"]


class PhaseTimeout(RelayError):
    """A phase that took longer than `config.Timeouts` allows; see `after`."""

    status = 504
    phase: ClassVar[Phase]
    late: ClassVar[str]
    """What did not happen in time."""

    @classmethod
    def after(cls, within_s: float) -> Self:
        return cls(f"{cls.late} within {within_s:g} s")


class EngineTimeout(PhaseTimeout):
    """One of the engine's phases."""


class ConnectTimeout(EngineTimeout):
    code = "engine_connect_timeout"
    phase = "connect"
    late = "no connection to the engine"
    retry_after_s = 2


class FirstByteTimeout(EngineTimeout):
    code = "engine_first_byte_timeout"
    phase = "first_byte"
    late = "the engine sent nothing of an answer"


class IdleTimeout(EngineTimeout):
    code = "engine_idle_timeout"
    phase = "idle"
    late = "the engine sent nothing more"


class TotalTimeout(PhaseTimeout):
    code = "request_total_timeout"
    phase = "total"
    late = "the request was not done"


class EngineRefused(RelayError):
    """An engine's own error, in OpenAI's shape, for a client whose answer has begun with keep-alives."""

    def __init__(self, body: bytes, status: int) -> None:
        super().__init__(error_message(body))
        self.status = status
        self._body = body

    def body(self) -> bytes:
        return self._body


class EngineFailed(EngineRefused):
    """An engine's own error as the first event of its stream: the client gets it as its answer."""

    def __init__(self, event: bytes) -> None:
        """`event` is the error in OpenAI's shape; the status is its `code`, as SGLang has it."""
        super().__init__(event, _status_in(event))


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

    def __init__(self) -> None:
        super().__init__("the gateway is shutting down")


class TooManyConnections(RelayError):
    status = 503
    code = "too_many_connections"
    retry_after_s = 2

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"connection", b"close")]


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(message: str, *, status: int, code: str | None = None, param: str | None = None) -> bytes:
    """``{"error": {message, type, param, code}}`` as JSON."""
    error = {"message": message, "type": error_type(status), "param": param, "code": code}
    return msgspec.json.encode({"error": error})


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
    if _is_openais(parsed):
        return body
    return _from_flat(parsed, status)


def normalise_error_event(data: bytes) -> bytes | None:
    """A flat error inside a stream, in OpenAI's shape; None if `data` is no flat error."""
    try:
        parsed = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(parsed, dict) or _is_openais(parsed):
        return None
    code = parsed.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return _from_flat(parsed, status)


def error_message(data: bytes) -> str:
    """What an error event without any known form says."""
    try:
        parsed = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        return "the engine reported an error"
    inner = parsed.get("error")
    return _message_of(inner if isinstance(inner, dict) else parsed, 500)


def _status_in(event: bytes) -> int:
    """The HTTP status that an error names as its code; 502 where it names none."""
    try:
        code = msgspec.json.decode(event)["error"]["code"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return 502
    return code if isinstance(code, int) and 400 <= code < 600 else 502


def _is_openais(parsed: dict[str, Any]) -> bool:
    """Whether it is an object `error` that says something."""
    error = parsed.get("error")
    return isinstance(error, dict) and isinstance(error.get("message"), str)


def _from_flat(parsed: dict[str, Any], status: int) -> bytes:
    inner = parsed.get("error")
    parsed = inner if isinstance(inner, dict) and inner else parsed
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
