"""OpenAI's chat and text completions."""

from __future__ import annotations

import msgspec

from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.dialects.base import Dialect, Document, Meter
from tokenflow_gateway.relay.errors import RelayError
from tokenflow_gateway.relay.meter import ABORTED, DONE, StreamMeter
from tokenflow_gateway.relay.request import Body, RequestFields, read_fields, upstream_body
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.relay.usage import Usage

__all__ = ["CompletionsDialect"]


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Document(msgspec.Struct):
    usage: Usage | None = None
    choices: list[_Choice] = []


_decode_document = msgspec.json.Decoder(_Document).decode


class CompletionsDialect(Dialect):
    """Chunks with `choices`, ended by ``[DONE]``."""

    def read_fields(self, parsed: Body) -> RequestFields:
        return read_fields(parsed)

    def upstream_body(self, body: bytes, parsed: Body, *, rid: str | None, stream: bool) -> bytes:
        return upstream_body(parsed, rid=rid, stream=stream)

    def meter(
        self, track: ReaderTrack, fields: RequestFields, *, max_event_bytes: int, sglang: bool
    ) -> Meter:
        return StreamMeter(
            track,
            max_event_bytes=max_event_bytes,
            keep_usage=fields.wants_usage,
            cut_usage=sglang and not fields.wants_usage_in_chunks,
        )

    def keep_alive(self, stream: Stream) -> bytes:
        """A chunk whose first choice has nothing in it, under the name that SGLang's own chunks bear."""
        if stream.route == "/v1/completions":
            kind, choice = "text_completion", {"index": 0, "text": "", "logprobs": None}
        else:
            kind, choice = "chat.completion.chunk", {"index": 0, "delta": {}, "logprobs": None}
        chunk = {
            "id": stream.rid,
            "object": kind,
            "created": int(stream.opened_at),
            "model": stream.model,
            "choices": [{**choice, "finish_reason": None}],
        }
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def document(self, body: bytes) -> Document:
        try:
            document = _decode_document(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return Document()
        return Document(document.usage, any(choice.finish_reason == ABORTED for choice in document.choices))

    def error_events(self, error: RelayError, *, sequence: int = 0) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE
