"""What the gateway reads of a request and adds to it before an engine sees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast, get_args

import msgspec

from tokenflow_engine.protocol import Reader
from tokenflow_gateway.relay.errors import BadRequest

__all__ = [
    "METERED_ROUTES",
    "ReaderFields",
    "RequestFields",
    "parse_object",
    "read_fields",
    "read_reader",
    "upstream_body",
]

METERED_ROUTES: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Routes whose answers are followed token by token; the others pass through."""


class RequestFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request's body that decide how it is relayed."""

    model: str | None
    stream: bool
    wants_usage: bool
    """The client asked for the usage chunk itself, so it is not removed."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises `BadRequest` naming the place of the fault."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise BadRequest("the request body must be a JSON object")
    return parsed


def read_fields(parsed: dict[str, Any]) -> RequestFields:
    """The deciding fields of a parsed body. Raises `BadRequest` for a wrong type."""
    model = parsed.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("`model` must be a string", param="model")
    stream = parsed.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("`stream` must be true or false", param="stream")
    return RequestFields(model=model, stream=bool(stream), wants_usage=_wants_usage(parsed))


def _wants_usage(parsed: dict[str, Any]) -> bool:
    options = parsed.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise BadRequest("`stream_options` must be an object", param="stream_options")
    return bool(options.get("include_usage"))


class ReaderFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says of its reader in the request's headers."""

    reader: Reader = "human"
    rate: float | None = None
    """Tokens per second (`X-TokenFlow-Rate`)."""


_MAX_RATE = 1000.0


def read_reader(headers: Iterable[tuple[bytes, bytes]]) -> ReaderFields:
    """The reader's headers. Raises `BadRequest` for a value that means nothing."""
    reader: Reader = "human"
    rate: float | None = None
    for name, value in headers:
        if name == b"x-tokenflow-reader":
            reader = _reader_kind(value.decode("latin-1"))
        elif name == b"x-tokenflow-rate":
            rate = _rate(value.decode("latin-1"))
    return ReaderFields(reader=reader, rate=rate)


def _reader_kind(value: str) -> Reader:
    if value not in get_args(Reader):
        raise BadRequest(f"X-TokenFlow-Reader must be one of {', '.join(get_args(Reader))}, not {value!r}")
    return cast(Reader, value)


def _rate(value: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= _MAX_RATE:
        raise BadRequest(f"X-TokenFlow-Rate must be tokens per second up to {_MAX_RATE:g}, not {value!r}")
    return rate


def upstream_body(parsed: dict[str, Any], *, rid: str | None, stream: bool) -> bytes:
    """The body for the engine: with the gateway's `rid` (engines that take one) and the usage it counts by.

    A `rid` of the client's is replaced: names of running requests are the gateway's to give.
    """
    sent = dict(parsed)
    sent.pop("rid", None)
    if rid is not None:
        sent["rid"] = rid
    if stream:
        sent["stream_options"] = {**(parsed.get("stream_options") or {}), "include_usage": True}
    return msgspec.json.encode(sent)
