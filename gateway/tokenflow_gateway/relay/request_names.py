"""Names of requests, from which can be told whose they are.

SGLang's name of a request is the id of the response that it stores, too, so whoever knows it could read or
delete what another tenant was answered, or go on from it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Final

__all__ = ["RequestNames"]

_RANDOM_BYTES: Final = 16
_TAG_BYTES: Final = 8
_TAG_CHARS: Final = 2 * _TAG_BYTES


class RequestNames:
    """A random name ends in a keyed hash of itself and of its tenant.

    Nothing is kept: all processes that share the key agree, and a restart forgets nothing.
    """

    def __init__(self, key: bytes) -> None:
        """`key`: at most 64 bytes."""
        self._key = key

    def new(self, prefix: str, tenant: str) -> str:
        """A name that no other request has had."""
        name = prefix + os.urandom(_RANDOM_BYTES).hex()
        return name + self._tag(name, tenant)

    def is_of(self, name: str, tenant: str) -> bool:
        """Whether `name` was made for this tenant. Takes the same time for every tag that is not right."""
        expected = self._tag(name[:-_TAG_CHARS], tenant)
        return hmac.compare_digest(expected.encode(), name[-_TAG_CHARS:].encode("utf-8", "replace"))

    def _tag(self, name: str, tenant: str) -> str:
        told = f"{name}\n{tenant}".encode("utf-8", "replace")
        return hashlib.blake2b(told, key=self._key, digest_size=_TAG_BYTES).hexdigest()
