"""Anthropic's messages, as SGLang (0.5.23, entrypoints/anthropic) serves them."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.dialects.base import Dialect, Document, Meter
from tokenflow_gateway.relay.dialects.named import NamedEventMeter, TokenUsage, read_document
from tokenflow_gateway.relay.errors import RelayError, error_message, normalise_error
from tokenflow_gateway.relay.request import Body, RequestFields, read_object, read_plain_fields
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.relay.upstream import Header

__all__ = ["MessagesDialect"]

_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_RID_HEADER = b"x-override-rid"
"""How SGLang takes a request's name where the body has no field for it, if
``SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`` is set, as the plugin does."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _Delta(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class _Message(msgspec.Struct):
    usage: TokenUsage | None = None


class _Event(msgspec.Struct):
    type: str
    delta: _Delta | None = None
    message: _Message | None = None
    usage: TokenUsage | None = None


_decode = msgspec.json.Decoder(_Event).decode


class MessagesMeter(NamedEventMeter):
    """Ended by `message_stop`; `message_delta` brings the reason and the usage before it."""

    def __init__(self, track: ReaderTrack, *, max_event_bytes: int) -> None:
        super().__init__(track, max_event_bytes=max_event_bytes)
        self._has_reason = False

    @property
    def complete(self) -> bool:
        return self._has_reason

    @property
    def ending(self) -> bytes:
        return b"" if self.failed else _STOP

    def _note(self, data: bytes) -> None:
        event = _decode(data)
        match event.type:
            case "content_block_delta" if event.delta is not None:
                if event.delta.text:
                    self._text(event.delta.text)
                elif event.delta.thinking or event.delta.partial_json:
                    self._hidden()
            case "message_start" if event.message is not None and event.message.usage is not None:
                self.usage = event.message.usage.merged(None)
            case "message_delta":
                self._has_reason |= event.delta is not None and event.delta.stop_reason is not None
                if event.usage is not None:
                    self._settle(event.usage)
            case kind:
                self._note_type(kind)

    def _note_type(self, kind: str) -> None:
        if kind == "message_stop":
            self.done = True
        elif kind == "error":
            self.failed = True

    def _unnamed_error(self, data: bytes) -> bytes:
        return _event({"type": "error", "error": {"type": "api_error", "message": error_message(data)}})


class MessagesDialect(Dialect):
    """Named events, errors as ``{"type": "error", "error": {...}}``. Bodies leave as they came."""

    def read_fields(self, parsed: Body) -> RequestFields:
        return read_plain_fields(parsed)

    def user(self, parsed: Body) -> msgspec.Raw | None:
        metadata = read_object(parsed.get("metadata"))
        return None if metadata is None else metadata.get("user_id")

    def upstream_headers(self, rid: str | None) -> list[Header]:
        return [] if rid is None else [(_RID_HEADER, rid.encode())]

    def upstream_body(self, body: bytes, parsed: Body, *, rid: str | None, stream: bool) -> bytes:
        return body

    def meter(
        self, track: ReaderTrack, fields: RequestFields, *, max_event_bytes: int, sglang: bool
    ) -> Meter:
        return MessagesMeter(track, max_event_bytes=max_event_bytes)

    def keep_alive(self, stream: Stream) -> bytes:
        return b'event: ping\ndata: {"type":"ping"}\n\n'

    def document(self, body: bytes) -> Document:
        return read_document(body)

    def error_body(self, error: RelayError) -> bytes:
        return msgspec.json.encode(_error(error))

    def refusal(self, body: bytes, status: int) -> bytes:
        """Those that are Anthropic's already leave as they came."""
        normal = normalise_error(body, status)
        parsed = msgspec.json.decode(normal)
        if parsed.get("type") == "error":
            return normal
        detail = {**parsed["error"], "type": _TYPES.get(status, "api_error")}
        return msgspec.json.encode({"type": "error", "error": detail})

    def error_events(self, error: RelayError, *, sequence: int = 0) -> bytes:
        return _event(_error(error))


def _error(error: RelayError) -> dict[str, Any]:
    detail = {
        "type": _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error"),
        "message": error.message,
        "param": error.param,
        "code": error.code,
    }
    return {"type": "error", "error": detail}


def _event(data: dict[str, Any]) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(data) + b"\n\n"
