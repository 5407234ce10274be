"""Which engine is likely to have a conversation in its prefix cache: the one that had its earlier turns.

Nothing is remembered: engines are ranked by a hash of their name and of what the turns of a conversation have
in common (rendezvous hashing). So all gateways agree, and an engine that goes or comes moves only its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable

import msgspec

__all__ = ["affinity_key", "favourite", "session_key"]

_PREFIX_BYTES = 1024
"""Of a prompt that is no list of messages: longer ones that begin alike are taken as one conversation."""
_FIRST = 2
"""Messages that a conversation is known by: the system's and the first of the user."""
_MOST_COMMAS = 50_000
"""In what is taken apart into messages: so many, at the most, they are."""
_MAX_SESSION_CHARS = 256

_MESSAGES = re.compile(rb"\[\s*\{")
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def affinity_key(parsed: dict[str, msgspec.Raw], session: str | None = None) -> bytes | None:
    """What a request's conversation is known by; None where nothing tells.

    `session` is the client's own word for it, and wins; then the body's `prompt_cache_key`, as OpenAI's.
    """
    named = session or _text(parsed.get("prompt_cache_key"))
    if named:
        return _digest([b"session", named.encode("utf-8", "surrogatepass")])
    parts = [parsed.get("system"), parsed.get("instructions")]
    for field in ("messages", "input", "prompt"):
        if (value := parsed.get(field)) is not None:
            return _digest([*(bytes(part) for part in parts if part is not None), *_beginning(value)])
    return None


def session_key(headers: Iterable[tuple[bytes, bytes]], tenant: str) -> str | None:
    """The conversation that `X-TokenFlow-Session` names, told apart from those of other tenants."""
    for name, value in headers:
        if name == b"x-tokenflow-session" and 0 < len(value) <= _MAX_SESSION_CHARS:
            return f"{tenant}\n{value.decode('latin-1')}"
    return None


def favourite(key: bytes, names: Iterable[str]) -> str:
    """The engine that this conversation goes to if nothing speaks against it."""
    return max(names, key=lambda name: hashlib.blake2b(name.encode(), key=key, digest_size=8).digest())


def _beginning(value: msgspec.Raw) -> list[bytes]:
    view = memoryview(value)
    if _MESSAGES.match(view) and (view.nbytes <= _MOST_COMMAS or bytes(view).count(b",") <= _MOST_COMMAS):
        with contextlib.suppress(RecursionError):  # a message is nested deeply
            return [bytes(message) for message in _decode_list(value)[:_FIRST]]
    return [bytes(view[:_PREFIX_BYTES])]


def _text(raw: msgspec.Raw | None) -> str | None:
    if raw is None or memoryview(raw).nbytes > 6 * _MAX_SESSION_CHARS:
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _digest(parts: list[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
