"""What the gateway reads of a request and adds to it before an engine sees it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tokenflow_gateway.relay.errors import BadRequest

__all__ = ["METERED_ROUTES", "RequestFields", "parse_object", "read_fields", "upstream_body"]

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
