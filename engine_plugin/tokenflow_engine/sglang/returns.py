"""How long preempted streams take to come back, and how soon they have to leave again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from tokenflow_engine.control.durations import DurationCounts
from tokenflow_engine.protocol import Durations

__all__ = ["Return", "Returns"]

Return = Literal["resumed", "loaded", "recomputed"]
"""Back into the batch with the KV on the device, from host memory, or by a prefill."""
_THRASH_S = 1.0


class Returns:
    """From the order that wants a stream back to the launch of its first pass, in monotonic seconds."""

    def __init__(self) -> None:
        self._counts: dict[Return, DurationCounts] = {}
        self._asked: dict[str, float] = {}
        """Ordered, and not begun."""
        self._begun: dict[str, tuple[Return, float]] = {}
        self._back_at: dict[str, float] = {}

    def ask(self, rids: Iterable[str], now: float) -> None:
        """All that the orders want back; one that they go on wanting has been asked for since the first."""
        self._asked = {rid: self._asked.get(rid, now) for rid in rids if rid not in self._begun}

    def asked_at(self, rid: str, now: float) -> float:
        """When it was asked for; `now` if nobody did."""
        begun = self._begun.get(rid)
        return self._asked.get(rid, now) if begun is None else begun[1]

    def begin(self, rid: str, kind: Return, asked_at: float) -> None:
        """It is on its way: what later orders say does not matter any more."""
        self._asked.pop(rid, None)
        self._begun[rid] = (kind, asked_at)

    def launched(self, batch: Any, unfinished: Any, now: float) -> None:
        """A pass is launched; `unfinished` is the request whose prompt needs another one."""
        if not self._begun:
            return
        for req in batch.reqs:
            begun = self._begun.pop(req.rid, None) if req is not unfinished else None
            if begun is not None:
                kind, asked_at = begun
                self._counts.setdefault(kind, DurationCounts()).add(now - asked_at)
                self._back_at[req.rid] = now

    def leaves(self, rid: str, now: float) -> bool:
        """It leaves the batch: True if it had come back less than a second ago."""
        self._begun.pop(rid, None)
        return now - self._back_at.pop(rid, float("-inf")) < _THRASH_S

    def forget(self, rid: str) -> None:
        """It has ended."""
        self._asked.pop(rid, None)
        self._begun.pop(rid, None)
        self._back_at.pop(rid, None)

    def durations(self) -> dict[str, Durations]:
        """By kind, since the start."""
        return {kind: counts.message() for kind, counts in self._counts.items()}
