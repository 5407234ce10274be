"""What the gateway reads of a request and adds to it before an engine sees it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast, get_args

import msgspec

from tokenflow_engine.protocol import Reader
from tokenflow_gateway.relay.errors import BadRequest

__all__ = [
    "Body",
    "ReaderFields",
    "RequestFields",
    "body_user",
    "named_body",
    "parse_object",
    "read_delivery",
    "read_fields",
    "read_flag",
    "read_object",
    "read_plain_fields",
    "read_reader",
    "read_text",
    "upstream_body",
    "with_priority",
    "without_priority",
]


class RequestFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request's body that decide how it is relayed."""

    model: str | None
    stream: bool
    wants_usage: bool = True
    """The client asked for the usage chunk itself, so it is not removed."""
    wants_usage_in_chunks: bool = True
    """The same of the usage in each chunk (SGLang's ``continuous_usage_stats``)."""
    continues: str | None = None
    """Id of the stored response that this one goes on from."""


Body = dict[str, msgspec.Raw]
"""A request's body: its fields by name, each as the JSON it came in. What is not looked at is not decoded."""

_decode_body = msgspec.json.Decoder(Body).decode
_READ_FIELDS = (
    "model",
    "stream",
    "stream_options",
    "rid",
    "user",
    "request_id",
    "metadata",
    "previous_response_id",
)
_READ_NAMES = {name: b'"%b"' % name.encode() for name in _READ_FIELDS}
_CHECKED_BYTES = 256 * 1024
"""Bodies up to this size are searched for fields that come twice; in others the last one counts."""
_BYTE = re.compile(r"^(?P<what>.*) \(byte (?P<at>\d+)\)$", re.DOTALL)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_NO_OPTIONS = _StreamOptions()
_decode_text = msgspec.json.Decoder(str | None).decode
_decode_flag = msgspec.json.Decoder(bool | None).decode
_decode_options = msgspec.json.Decoder(_StreamOptions | None).decode
_decode_object = msgspec.json.Decoder(Body | None).decode


def parse_object(body: bytes) -> Body:
    """The body as a JSON object. Raises `BadRequest` naming the place of the fault."""
    try:
        parsed = _decode_body(body)
    except msgspec.ValidationError as error:
        raise BadRequest("the request body must be a JSON object") from error
    except RecursionError as error:
        raise BadRequest("the request body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request body is not valid JSON: {_where(body, error)}") from error
    if len(body) <= _CHECKED_BYTES:
        _refuse_doubles(body, parsed)
    return parsed


def _where(body: bytes, error: Exception) -> str:
    """What is wrong with `body` and where: line and column count from 1, in bytes."""
    if isinstance(error, UnicodeDecodeError):
        what, at = "text that is not UTF-8", error.start
    elif found := _BYTE.match(str(error)):
        what, at = found["what"], int(found["at"])
    else:
        what, at = str(error), len(body)  # cut off
    what = what.removeprefix("JSON is malformed: ")
    line, column = body.count(b"\n", 0, at) + 1, at - body.rfind(b"\n", 0, at)
    return f"{what} at line {line}, column {column} (byte {at})"


def _refuse_doubles(body: bytes, parsed: Body) -> None:
    """Raises `BadRequest` for a field that the gateway reads and that is there twice.

    Two readers of such a body could take it differently. Such a name stands outside the values that count
    more than once: as a field, or in the value of a field that came again.
    """
    for field in parsed:
        if (name := _READ_NAMES.get(field)) is None:
            continue
        named = body.count(name)
        if named > 1 and named - sum(bytes(value).count(name) for value in parsed.values()) > 1:
            raise BadRequest(f"`{field}` is there more than once", param=field)


def read_fields(parsed: Body) -> RequestFields:
    """The deciding fields of a chat or completion. Raises `BadRequest` for a wrong type."""
    options = _field(parsed, "stream_options", _decode_options, "an object") or _NO_OPTIONS
    return RequestFields(
        model=read_text(parsed, "model"),
        stream=read_flag(parsed, "stream"),
        wants_usage=bool(options.include_usage),
        wants_usage_in_chunks=bool(options.continuous_usage_stats),
    )


def read_plain_fields(parsed: Body) -> RequestFields:
    """Those that all dialects share. Raises `BadRequest` for a wrong type."""
    return RequestFields(model=read_text(parsed, "model"), stream=read_flag(parsed, "stream"))


def read_text(parsed: Body, name: str) -> str | None:
    """A field that is a string, or else null or missing. Raises `BadRequest`."""
    text: str | None = _field(parsed, name, _decode_text, "a string")
    return text


def read_flag(parsed: Body, name: str) -> bool:
    """A field that is true, or else false, null or missing. Raises `BadRequest`."""
    return bool(_field(parsed, name, _decode_flag, "true or false"))


def read_object(raw: msgspec.Raw | None) -> Body | None:
    """A field that may be an object; None if it is anything else."""
    if raw is None:
        return None
    try:
        return _decode_body(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _field(parsed: Body, name: str, decode: Callable[[msgspec.Raw], Any], kind: str) -> Any:
    """One field decoded; None where it is missing or null. `kind`: in words, what it must be."""
    raw = parsed.get(name)
    if raw is None:
        return None
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        _, inside, path = str(error).partition(" - at `$.")
        where = f"{name}.{path.rstrip('`')}" if inside else name
        what = str(error).partition(" - at ")[0]
        raise BadRequest(f"`{name}` must be {kind}: {what}", param=where) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"`{name}` must be {kind}", param=name) from error


class ReaderFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says of its reader."""

    reader: Reader = "human"
    rate: float | None = None
    """Tokens per second (`X-TokenFlow-Rate`)."""
    user: str | None = None
    """Who reads, in the client's words: opaque, and not for logs."""


_LEAST_RATE, _MAX_RATE = 0.05, 1000.0
_RATE = re.compile(r"[0-9]{1,4}(\.[0-9]{1,20})?")
_MAX_USER_CHARS = 256


def read_reader(
    headers: Iterable[tuple[bytes, bytes]], named_inside: msgspec.Raw | None, *, user_header: str
) -> ReaderFields:
    """What headers and body say of the reader. Raises `BadRequest` for a header's value that means nothing.

    Who reads is in `user_header`, or else in the body's own field, `named_inside`; see `body_user`.
    """
    reader: Reader = "human"
    rate: float | None = None
    user: str | None = None
    named = user_header.lower().encode()
    for name, value in headers:
        if name == b"x-tokenflow-reader":
            reader = _reader_kind(value.decode("latin-1"))
        elif name == b"x-tokenflow-rate":
            rate = _rate(value.decode("latin-1"))
        elif name == named:
            user = _user(value, user_header)
    return ReaderFields(reader=reader, rate=rate, user=user or body_user(named_inside))


def _user(value: bytes, header: str) -> str:
    if len(value) > _MAX_USER_CHARS:
        raise BadRequest(f"{header} must be a name of at most {_MAX_USER_CHARS} characters")
    return value.decode("utf-8", "surrogateescape").strip()


def body_user(raw: msgspec.Raw | None) -> str | None:
    """The reader that a body names. It is the engine's to judge: nobody, if it is no string, or too long."""
    if raw is None or memoryview(raw).nbytes > 6 * _MAX_USER_CHARS:
        return None
    try:
        user = msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return user.strip() or None if len(user) <= _MAX_USER_CHARS else None


DeliveryMode = Literal["immediate", "paced"]


def read_delivery(headers: Iterable[tuple[bytes, bytes]]) -> DeliveryMode:
    """How the client wants its stream (`X-TokenFlow-Delivery`). Raises `BadRequest` for anything else."""
    for name, value in headers:
        if name == b"x-tokenflow-delivery":
            mode = value.decode("latin-1")
            if mode not in get_args(DeliveryMode):
                raise BadRequest(
                    f"X-TokenFlow-Delivery must be one of {', '.join(get_args(DeliveryMode))}, not {mode!r}"
                )
            return cast(DeliveryMode, mode)
    return "immediate"


def _reader_kind(value: str) -> Reader:
    if value not in get_args(Reader):
        raise BadRequest(f"X-TokenFlow-Reader must be one of {', '.join(get_args(Reader))}, not {value!r}")
    return cast(Reader, value)


def _rate(value: str) -> float:
    rate = float(value) if _RATE.fullmatch(value) else 0.0
    if not _LEAST_RATE <= rate <= _MAX_RATE:
        raise BadRequest(
            "X-TokenFlow-Rate must be tokens per second, a decimal number from "
            f"{_LEAST_RATE:g} to {_MAX_RATE:g}, not {value!r}"
        )
    return rate


def upstream_body(parsed: Body, *, rid: str | None, stream: bool) -> bytes:
    """The body for the engine, with the usage that the gateway counts by.

    SGLang gets the gateway's `rid` (None for others), too, and is asked for usage in each chunk.
    A `rid` of the client's is replaced: names of running requests are the gateway's to give. All other fields
    leave as they came.
    """
    sent: dict[str, Any] = dict(parsed)
    sent.pop("rid", None)
    if rid is not None:
        sent["rid"] = rid
    if stream:
        options = _field(parsed, "stream_options", _decode_object, "an object") or {}
        options["include_usage"] = True
        if rid is not None:
            options["continuous_usage_stats"] = True
        sent["stream_options"] = options
    return msgspec.json.encode(sent)


def with_priority(body: bytes, parsed: Body, priority: int | None) -> tuple[bytes, Body]:
    """Body and fields with this `priority`, or without any: what a client says of its own is no order."""
    if priority is None and "priority" not in parsed:
        return body, parsed
    others = {name: value for name, value in parsed.items() if name != "priority"}
    if priority is not None:
        others["priority"] = msgspec.Raw(msgspec.json.encode(priority))
    return msgspec.json.encode(others), others


def without_priority(body: bytes) -> bytes:
    """A body that is passed on unread, but for that field; as it came if it is no JSON object with one."""
    try:
        parsed = _decode_body(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    return with_priority(body, parsed, None)[0]


def named_body(parsed: Body, field: str, rid: str | None) -> bytes:
    """The body with the gateway's name for the request in `field`, or with none; the rest as it came."""
    sent = {name: value for name, value in parsed.items() if name != field}
    if rid is not None:
        sent[field] = msgspec.Raw(msgspec.json.encode(rid))
    return msgspec.json.encode(sent)
