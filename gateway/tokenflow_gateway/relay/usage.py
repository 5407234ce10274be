"""OpenAI's `usage`, and how to take it out of a chunk that has it only because the gateway asked for it."""

from __future__ import annotations

import msgspec

from tokenflow_gateway.relay.sse import Event

__all__ = ["Usage", "without_usage"]

_KEY = b',"usage":'
_END = b"}\n\n"
_NULL_END = _KEY + b"null" + _END
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


_MOST_TOKENS = 10_000_000
"""More than any context holds. A larger count is an engine's fault, and is not to reach counters."""


class Usage(msgspec.Struct, frozen=True):
    """The counts, as far as they are used. Engines have sent them as null and as fractions."""

    prompt_tokens: float | None = 0
    completion_tokens: float | None = 0

    @property
    def prompt(self) -> int:
        return _count(self.prompt_tokens)

    @property
    def completion(self) -> int:
        return _count(self.completion_tokens)


def _count(tokens: float | None) -> int:
    return int(min(max(tokens or 0, 0), _MOST_TOKENS))


_decode_usage = msgspec.json.Decoder(Usage).decode


def without_usage(event: Event, *, leaves_null: bool) -> bytes:
    """The event as the engine would have sent it, had it not been asked for usage with each chunk.

    `leaves_null`: in events of this kind the field is null then; in others it is absent. In SGLang's chunks
    it is the last one, and all other bytes stay. Elsewhere the JSON is written anew, if it can be.
    """
    raw = event.raw
    at = raw.rfind(_KEY)  # a quote inside a string has a backslash before it: this is a key
    if (
        at > 0
        and raw.endswith(_END)
        and raw.startswith(b"data: {")
        and _is_one_usage(raw[at + len(_KEY) : -len(_END)])
    ):
        return raw[:at] + (_NULL_END if leaves_null else _END)
    return _rewritten(event, leaves_null=leaves_null)


def _is_one_usage(json: bytes) -> bool:
    """Whether this is one whole object, so that nothing but the end of the chunk follows it."""
    try:
        _decode_usage(json)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _rewritten(event: Event, *, leaves_null: bool) -> bytes:
    try:
        fields = _decode_fields(event.data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return event.raw  # the name of a field is no UTF-8: what is in it is not ours to judge
    if leaves_null:
        fields["usage"] = msgspec.Raw(b"null")
    else:
        fields.pop("usage", None)
    name = event.event
    head = b"event: " + name + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(fields) + b"\n\n"
