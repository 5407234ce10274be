"""Names of requests, from which can be told whose they are, and which engine was asked.

SGLang's name of a request is the id of the response that it stores, too, so whoever knows it could read or
delete what another tenant was answered, or go on from it; and only that engine has it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from typing import Final

__all__ = ["RequestNames"]

_RANDOM_BYTES: Final = 16
_ENGINE_BYTES: Final = 4
_TENANT_BYTES: Final = 8


class RequestNames:
    """A random name ends in keyed hashes of itself with its engine, and of all that with its tenant.

    Nothing is kept: all processes that share the key agree, and a restart forgets nothing.
    """

    def __init__(self, key: bytes) -> None:
        """`key`: at most 64 bytes."""
        self._key = key

    def new(self, prefix: str, tenant: str, engine: str) -> str:
        """A name that no other request has had."""
        name = prefix + os.urandom(_RANDOM_BYTES).hex()
        name += self._tag(name, engine, _ENGINE_BYTES)
        return name + self._tag(name, tenant, _TENANT_BYTES)

    def is_of(self, name: str, tenant: str) -> bool:
        """Whether `name` was made for this tenant. Takes the same time for every tag that is not right."""
        return self._ends_in_tag(name, tenant, _TENANT_BYTES)

    def engine_of(self, name: str, engines: Iterable[str]) -> str | None:
        """The one of these engines that `name` was made for; None for names that were not made here."""
        name = name[: -2 * _TENANT_BYTES]
        return next((engine for engine in engines if self._ends_in_tag(name, engine, _ENGINE_BYTES)), None)

    def _ends_in_tag(self, name: str, whose: str, size: int) -> bool:
        expected = self._tag(name[: -2 * size], whose, size)
        return hmac.compare_digest(expected.encode(), name[-2 * size :].encode("utf-8", "replace"))

    def _tag(self, name: str, whose: str, size: int) -> str:
        told = f"{name}\n{whose}".encode("utf-8", "replace")
        return hashlib.blake2b(told, key=self._key, digest_size=size).hexdigest()
