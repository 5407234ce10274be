"""OpenAI's responses, as SGLang (0.5.23, serving_responses.py) serves them."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.dialects.base import Dialect, Document, Meter
from tokenflow_gateway.relay.dialects.named import NamedEventMeter, TokenUsage, read_document
from tokenflow_gateway.relay.errors import RelayError, error_message, error_type
from tokenflow_gateway.relay.request import (
    Body,
    RequestFields,
    named_body,
    read_plain_fields,
    read_text,
)

__all__ = ["ResponsesDialect"]

_READABLE = frozenset({"response.output_text.delta", "response.refusal.delta"})
_ENDS = frozenset({"response.completed", "response.incomplete"})
_FAILURES = frozenset({"response.failed", "response.cancelled", "error"})


class _Response(msgspec.Struct):
    usage: TokenUsage | None = None


class _Event(msgspec.Struct):
    type: str
    delta: str | None = None
    response: _Response | None = None
    sequence_number: int | None = None


_decode = msgspec.json.Decoder(_Event).decode


class ResponsesMeter(NamedEventMeter):
    """Ended by the event that says how the response ended, which carries its usage."""

    def _note(self, data: bytes) -> None:
        event = _decode(data)
        if event.sequence_number is not None:
            self.sequence = event.sequence_number + 1
        if event.delta is not None and event.type.endswith(".delta"):
            if not event.delta:
                return
            if event.type in _READABLE:
                self._text(event.delta)
            else:
                self._hidden()
            return
        self._note_type(event.type)
        if self.done and event.response is not None and event.response.usage is not None:
            self._settle(event.response.usage)

    def _note_type(self, kind: str) -> None:
        self.failed |= kind in _FAILURES
        self.done = self.failed or kind in _ENDS

    def _unnamed_error(self, data: bytes) -> bytes:
        self.done = True
        return _event(error_message(data), code=None, kind="server_error", param=None, sequence=self.sequence)


class ResponsesDialect(Dialect):
    """Named and numbered events; errors in OpenAI's shape."""

    rid_prefix = "resp_"
    """SGLang's name of a request is the id of its response here, which has to look like one."""

    def read_fields(self, parsed: Body) -> RequestFields:
        fields = read_plain_fields(parsed)
        continues = read_text(parsed, "previous_response_id")
        return msgspec.structs.replace(fields, continues=continues)

    def upstream_body(self, body: bytes, parsed: Body, *, rid: str | None, stream: bool) -> bytes:
        return body if rid is None and "request_id" not in parsed else named_body(parsed, "request_id", rid)

    def meter(
        self, track: ReaderTrack, fields: RequestFields, *, max_event_bytes: int, sglang: bool
    ) -> Meter:
        return ResponsesMeter(track, max_event_bytes=max_event_bytes)

    def document(self, body: bytes) -> Document:
        return read_document(body)

    def error_events(self, error: RelayError, *, sequence: int = 0) -> bytes:
        kind = error_type(error.status)
        return _event(error.message, code=error.code, kind=kind, param=error.param, sequence=sequence)


def _event(message: str, *, code: str | None, kind: str, param: str | None, sequence: int) -> bytes:
    """`error` as the reference has it, flat, and as OpenAI's server sends it, nested: SDKs read either."""
    detail = {"type": kind, "code": code, "message": message, "param": param}
    data: dict[str, Any] = {**detail, "type": "error", "sequence_number": sequence, "error": detail}
    return b"event: error\ndata: " + msgspec.json.encode(data) + b"\n\n"
