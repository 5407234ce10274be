"""Who can give up its place: streams whose readers have most to read, seen from when they could be back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Phase, Reason
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.rows import lowest, running

__all__ = ["Victims"]

_MOST = 64
"""Streams that one plan can take out."""
_PARKED = int(Phase.PARKED)


class _Victim(NamedTuple):
    row: int
    spare_s: float
    """Its slack less the cost of its return."""
    owned: int
    running: bool
    weight: float


class Victims:
    """Streams on the device that may go, those with the most to spare first.

    Of equal ones, lighter classes go first, and who is synced: that costs nothing. Hysteresis: a stream stays
    for `least_s` seconds after it came, unless its reader has paused.
    """

    def __init__(
        self, view: EngineView, draft: Draft, slack: Floats, costs: Floats, *, least_s: float
    ) -> None:
        self._view, self._draft = view, draft
        self._spare = np.minimum(slack - costs, 1e6)
        self._running = running(view)
        here = (self._running | (view.phase == _PARKED)) & view.may_park & (view.owned > 0)
        settled = (view.now - view.since >= least_s) | (view.paused & (view.generated > 0))
        self._key = -(self._spare + 0.5 * view.synced / np.maximum(view.owned, 1)) / np.sqrt(view.weight)
        self._young, self._old = here & ~settled, here & settled
        self._first = 0
        """All before it are gone."""

    def make_room(self, row: int, *, ahead_s: float, relegate: bool = False) -> bool:
        """Take out streams at least `ahead_s` ahead until `row` will fit. False, and none, if too few.

        `relegate`: streams of a lighter class than the row's go whatever their readers have left.
        Where only places in the batch are short, the victim is parked: its KV stays.
        """
        draft = self._draft
        tokens = draft.needs(row) - draft.soon
        places = 1 - draft.places
        rows = 1 - draft.rows if self._view.phase[row] != _PARKED else 0
        soft = tokens <= 0 and rows <= 0
        if not relegate and self._most_spare < ahead_s:
            return False
        weight = float(self._view.weight[row])
        chosen: list[int] = []
        for victim in islice(self._settled, self._first, None):
            if tokens <= 0 and places <= 0 and rows <= 0:
                break
            if victim.spare_s < ahead_s and not (relegate and victim.weight < weight):
                continue
            useful = tokens > 0 or rows > 0 or victim.running
            if not useful or draft.taken(victim.row) or victim.row == row:
                continue
            chosen.append(victim.row)
            tokens -= victim.owned
            places -= int(victim.running)
            rows -= 1
        if tokens > 0 or places > 0 or (rows > 0 and not soft):
            return False
        for gone in chosen:
            (draft.park if soft else draft.evict)(gone, self.why(gone))
        while self._first < len(self._settled) and draft.taken(self._settled[self._first].row):
            self._first += 1
        return True

    def for_memory(self) -> Iterator[int]:
        """Whoever must go so that the batch can take its next steps: those ahead first, then all that may."""
        for victim in self._settled:
            if not self._draft.taken(victim.row):
                yield victim.row
        for victim in self._best(self._young):
            yield victim.row

    def likeliest(self, count: int) -> list[int]:
        """Rows that would go first."""
        return [victim.row for victim in islice(self._settled, count)]

    def why(self, row: int) -> Reason:
        """What makes it a victim."""
        if self._view.machine[row]:
            return Reason.NO_READER
        return Reason.PAUSED if self._view.paused[row] else Reason.AHEAD

    @cached_property
    def _most_spare(self) -> float:
        return max((victim.spare_s for victim in self._settled), default=float("-inf"))

    @cached_property
    def _settled(self) -> list[_Victim]:
        return self._best(self._old)

    def _best(self, mask: Bools) -> list[_Victim]:
        rows = lowest(self._key, np.flatnonzero(mask), _MOST)
        view = self._view
        columns = (rows, self._spare[rows], view.owned[rows], self._running[rows], view.weight[rows])
        return [_Victim(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
