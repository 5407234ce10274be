"""Whom a front end asks for, in its own headers. `Access` has taken them away where they are not trusted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["identity_of"]

_USER: Final = b"x-openwebui-user-id"
_CHARS: Final = 256


def identity_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The user's id; None where nobody says."""
    for name, value in headers:
        if name == _USER and len(value) <= _CHARS:
            return value.decode("utf-8", "surrogateescape").strip() or None
    return None
