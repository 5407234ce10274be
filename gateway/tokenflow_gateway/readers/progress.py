"""Progress reports of clients: who may send them, and what one may say."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Iterable
from typing import Annotated

import msgspec

__all__ = ["MAX_REPORTS", "Capabilities", "ProgressError", "ProgressReport", "decode_progress"]

MAX_REPORTS = 64
"""Reports in one request."""
_MAX_AGE_MS = 60_000.0
_MAX_RATE = 1000.0


class ProgressError(ValueError):
    """A body that is no batch of reports; the message says what is wrong with it."""


class ProgressReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says its reader has consumed since the start of the answer; see docs/progress.md."""

    seq: Annotated[int, msgspec.Meta(ge=0)]
    age_ms: Annotated[float, msgspec.Meta(ge=0, le=_MAX_AGE_MS)] = 0.0
    tokens: Annotated[float, msgspec.Meta(ge=0)] | None = None
    chars: Annotated[int, msgspec.Meta(ge=0)] | None = None
    rate: Annotated[float, msgspec.Meta(gt=0, le=_MAX_RATE)] | None = None
    visible: bool = True
    paused: bool = False

    @property
    def says_something(self) -> bool:
        """Whether there is anything in it beside its number."""
        position = self.tokens is not None or self.chars is not None
        return position or self.rate is not None or self.paused or not self.visible


class _Batch(msgspec.Struct, frozen=True, kw_only=True):
    reports: Annotated[list[ProgressReport], msgspec.Meta(min_length=1, max_length=MAX_REPORTS)]
    capability: str = ""


_decode = msgspec.json.Decoder(_Batch).decode


def decode_progress(body: bytes) -> tuple[str, list[ProgressReport]]:
    """The capability (may be empty) and the reports, by `seq`. Raises `ProgressError`."""
    try:
        batch = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProgressError(f"not a batch of progress reports: {error}") from error
    if not all(report.says_something for report in batch.reports):
        raise ProgressError("a report needs a position (`tokens` or `chars`), a `rate` or a pause")
    return batch.capability, sorted(batch.reports, key=lambda report: report.seq)


class Capabilities:
    """Grants the right to report on one stream: a keyed hash of its id and of the process that has it.

    All processes of a gateway, or of a fleet of them, share the key, so that each knows whose stream a report
    is for.
    """

    def __init__(
        self, key: bytes, *, owner: str = "0", others: Callable[[], Iterable[str]] = lambda: ()
    ) -> None:
        """`key`: at most 64 bytes. `owner`: this process's name among all; `others`: the others' now."""
        self._key = key
        self._owner = owner
        self._others = others

    def grant(self, rid: str) -> str:
        """The capability for `rid`, a stream of this process: 22 characters of base64url."""
        return self._of(self._owner, rid)

    def allows(self, rid: str, capability: str) -> bool:
        """Whether `capability` was granted for `rid`, here. Takes the same time for every wrong one."""
        return self._granted(self._owner, rid, capability)

    def owner_of(self, rid: str, capability: str) -> str | None:
        """Who granted `capability` for `rid`; None if none of those known did."""
        if self.allows(rid, capability):
            return self._owner
        return next((other for other in self._others() if self._granted(other, rid, capability)), None)

    def _granted(self, owner: str, rid: str, capability: str) -> bool:
        return hmac.compare_digest(self._of(owner, rid).encode(), capability.encode("utf-8", "replace"))

    def _of(self, owner: str, rid: str) -> str:
        digest = hashlib.blake2b(f"{owner}:{rid}".encode(), key=self._key, digest_size=16).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
