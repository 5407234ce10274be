"""API keys: ``tf-<id>-<secret>``. The id is public and names the key; of the secret only a hash is kept.

The hash is a plain SHA-256. A slow one (argon2, scrypt) is for secrets that people choose, where an attacker
with the hash tries likely ones. Here the secret has 256 random bits, which no speed of trying gets through; a
slow hash would cost every request its milliseconds, and give strangers a way to burn the gateway's CPU.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from dataclasses import dataclass, replace
from typing import Final

from tokenflow_gateway.tenants.model import UNLIMITED, KeyKind, Limits

__all__ = ["KEY_PREFIX", "ApiKey", "KeyRecord", "NewKey", "new_key", "parse_key"]

_ID_CHARS: Final = 12
_SECRET_CHARS: Final = 43
"""Of 62 letters and digits: 256 bits."""
_LETTERS: Final = string.ascii_letters + string.digits
KEY_PREFIX: Final = "tf-"
"""What begins so is a key of ours, or a mistake."""
_KEY = re.compile(rf"{KEY_PREFIX}([a-z0-9]{{{_ID_CHARS}}})-([A-Za-z0-9]{{{_SECRET_CHARS}}})")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as a client gives it. Its `repr` is fit for logs."""

    id: str
    secret: str

    @property
    def hash(self) -> bytes:
        return hashlib.sha256(self.secret.encode()).digest()

    def __repr__(self) -> str:
        return f"ApiKey(id={self.id!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """A key as it is kept. Times are Unix seconds."""

    id: str
    hash: bytes
    tenant: str
    kind: KeyKind = "client"
    label: str = ""
    """What people call it."""
    classes: tuple[str, ...] | None = None
    """Of the tenant's classes, those that this key may use; None for all."""
    engines: frozenset[str] | None = None
    """The same of engines."""
    limits: Limits = UNLIMITED
    """For this key, beside those of its tenant."""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    replaces: str | None = None
    """The key that it was made for by rotation."""

    def matches(self, key: ApiKey) -> bool:
        """Whether this is that key. Takes the same time for every wrong secret."""
        return hmac.compare_digest(self.hash, key.hash)

    def merged(self, other: KeyRecord) -> KeyRecord:
        """The same key as known elsewhere: what ends it, wherever it is known, ends it."""
        return replace(
            self,
            expires_at=_earliest(self.expires_at, other.expires_at),
            revoked_at=_earliest(self.revoked_at, other.revoked_at),
        )

    @property
    def ends_at(self) -> float | None:
        return _earliest(self.expires_at, self.revoked_at)

    def state(self, now: float) -> str:
        """``active``, ``revoked`` or ``expired``."""
        if self.revoked_at is not None and self.revoked_at <= now:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "expired"
        return "active"


def _earliest(one: float | None, other: float | None) -> float | None:
    return min((at for at in (one, other) if at is not None), default=None)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key on the one occasion on which it is known in full."""

    key: ApiKey

    @property
    def text(self) -> str:
        """To be shown once, and never stored."""
        return f"{KEY_PREFIX}{self.key.id}-{self.key.secret}"


def new_key() -> NewKey:
    """A key that nobody has had before."""
    name = "".join(secrets.choice(_LETTERS[:26] + string.digits) for _ in range(_ID_CHARS))
    secret = "".join(secrets.choice(_LETTERS) for _ in range(_SECRET_CHARS))
    return NewKey(ApiKey(name, secret))


def parse_key(text: str) -> ApiKey | None:
    """The key that a client sent; None for anything that is no key of ours."""
    match = _KEY.fullmatch(text)
    return None if match is None else ApiKey(match[1], match[2])
