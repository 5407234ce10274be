"""Progress reports of clients: who may send them, and what one may say."""

from __future__ import annotations

import base64
import hashlib
import hmac
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
    """Grants the right to report on one stream: a keyed hash of its id and of the worker that has it.

    All `workers` of a gateway share the key, so that each knows whose stream a report is for.
    """

    def __init__(self, key: bytes, *, worker: int = 0, workers: int = 1) -> None:
        """`key`: at most 64 bytes."""
        self._key = key
        self._worker = worker
        self._others = [other for other in range(workers) if other != worker]

    def grant(self, rid: str) -> str:
        """The capability for `rid`, a stream of this worker: 22 characters of base64url."""
        return self._of(self._worker, rid)

    def allows(self, rid: str, capability: str) -> bool:
        """Whether `capability` was granted for `rid`, here. Takes the same time for every wrong one."""
        return self._granted(self._worker, rid, capability)

    def worker_of(self, rid: str, capability: str) -> int | None:
        """The worker that granted `capability` for `rid`; None if none did."""
        if self.allows(rid, capability):
            return self._worker
        return next((other for other in self._others if self._granted(other, rid, capability)), None)

    def _granted(self, worker: int, rid: str, capability: str) -> bool:
        return hmac.compare_digest(self._of(worker, rid).encode(), capability.encode("utf-8", "replace"))

    def _of(self, worker: int, rid: str) -> str:
        digest = hashlib.blake2b(f"{worker}:{rid}".encode(), key=self._key, digest_size=16).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
