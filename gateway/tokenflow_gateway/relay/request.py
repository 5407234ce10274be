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


Body = dict[str, msgspec.Raw]
"""A request's body: its fields by name, each as the JSON it came in. What is not looked at is not decoded."""

_decode_body = msgspec.json.Decoder(Body).decode


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


def parse_object(body: bytes) -> Body:
    """The body as a JSON object. Raises `BadRequest` naming the place of the fault."""
    try:
        return _decode_body(body)
    except msgspec.ValidationError as error:
        raise BadRequest("the request body must be a JSON object") from error
    except RecursionError as error:
        raise BadRequest("the request body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from error


def read_fields(parsed: Body) -> RequestFields:
    """The deciding fields of a parsed body. Raises `BadRequest` for a wrong type."""
    model = _field(parsed, "model", str | None, "`model` must be a string")
    stream = _field(parsed, "stream", bool | None, "`stream` must be true or false")
    options = _field(parsed, "stream_options", _StreamOptions | None, "`stream_options` must be an object")
    return RequestFields(
        model=model, stream=bool(stream), wants_usage=bool(options is not None and options.include_usage)
    )


def _field(parsed: Body, name: str, kind: Any, message: str) -> Any:
    """One field decoded; None where it is missing or null."""
    raw = parsed.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(message, param=name) from error


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


def upstream_body(parsed: Body, *, rid: str | None, stream: bool) -> bytes:
    """The body for the engine: with the gateway's `rid` (engines that take one) and the usage it counts by.

    A `rid` of the client's is replaced: names of running requests are the gateway's to give. All other fields
    leave as they came.
    """
    sent = dict(parsed)
    sent.pop("rid", None)
    if rid is not None:
        sent["rid"] = msgspec.Raw(msgspec.json.encode(rid))
    if stream:
        options = _field(parsed, "stream_options", Body | None, "`stream_options` must be an object") or {}
        options["include_usage"] = msgspec.Raw(b"true")
        sent["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    return msgspec.json.encode(sent)
