"""Streams closed before the engine had seen all of them: their requests are aborted as they arrive."""

from __future__ import annotations

from tokenflow_engine.control.owners import Owner

__all__ = ["Tombstones"]

_TTL_S = 60.0
_MAX_TOMBSTONES = 4096


class Tombstones:
    """A bounded set of rids with a time to live; the oldest go first. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._placed: dict[str, tuple[Owner, float]] = {}

    def __len__(self) -> int:
        return len(self._placed)

    def place(self, rid: str, *, owner: Owner, now: float) -> None:
        """Requests of this stream shall not start; `owner` is told when one was stopped."""
        self._placed.pop(rid, None)
        self._placed[rid] = (owner, now)
        self._drop_old(now)

    def lift(self, rid: str) -> None:
        """The stream is opened (again): its requests may start."""
        self._placed.pop(rid, None)

    def find(self, rid: str, *, now: float) -> Owner | None:
        """Who closed this stream less than a minute ago."""
        owner, placed_at = self._placed.get(rid, (None, 0.0))
        return owner if owner is not None and now - placed_at < _TTL_S else None

    def _drop_old(self, now: float) -> None:
        while self._placed:
            rid, (_, placed_at) = next(iter(self._placed.items()))
            if now - placed_at < _TTL_S and len(self._placed) <= _MAX_TOMBSTONES:
                break
            del self._placed[rid]
