"""Who can give up its place: streams whose readers have most to read, seen from when they could be back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Phase
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.room import why_gone
from tokenflow_engine.policy.rows import ascending, lowest

__all__ = ["Victims"]

_MOST = 64
"""Streams that one plan can take out."""
_FAR_S = 1e6
"""More than this is not to be told apart."""
_PARKED = int(Phase.PARKED)


_Victim = tuple[int, float, int, bool, float]
"""Row, slack less the cost of its return, KV it owns, whether it runs, weight."""


class _Wanted(NamedTuple):
    tokens: int
    places: int
    rows: int
    """Of the engine's request table."""
    ahead_s: float
    above: float
    """Streams of a lower weight go whatever their readers have left."""

    def is_as_much_as(self, other: _Wanted) -> bool:
        """If that could not be had, this cannot: what there is only grows less."""
        return (
            self.tokens >= other.tokens
            and self.places >= other.places
            and self.rows >= other.rows
            and self.ahead_s >= other.ahead_s
            and self.above <= other.above
        )


class Victims:
    """Streams on the device that may go, those with the most to spare first.

    Of equal ones, lighter classes go first, and who is synced: that costs nothing. Hysteresis: a stream stays
    until it is `settled`, unless its reader has paused, and those that came back a moment ago (`recent`) go
    last: where steps are fast they have gained much since, and a reader who runs dry cannot wait.
    """

    def __init__(
        self, view: EngineView, draft: Draft, slack: Floats, costs: Floats, *, settled: Bools, recent: Bools
    ) -> None:
        self._view, self._draft, self._recent = view, draft, recent
        self._slack, self._costs = slack, costs
        here = (view.running | view.parked) & view.may_park & (view.owned > 0)
        settled = settled | (view.paused & (view.generated > 0))
        self._young, self._old = here & ~settled, here & settled
        self._first = 0
        """All before it are gone."""
        self._missed: _Wanted | None = None
        """The last that was not found."""

    def make_room(self, row: int, *, ahead_s: float, relegate: bool = False) -> bool:
        """Take out streams at least `ahead_s` ahead until `row` will fit. False, and none, if too few.

        `relegate`: streams of a lighter class than the row's go whatever their readers have left.
        Where only places in the batch are short, the victim is parked: its KV stays.
        """
        draft, phase = self._draft, self._view.phase.item(row)
        wanted = _Wanted(
            draft.needs(row) - draft.soon,
            1 - draft.places,
            1 - draft.rows if phase != _PARKED else 0,
            ahead_s,
            self._view.weight.item(row) if relegate else 0.0,
        )
        if self._missed is not None and wanted.is_as_much_as(self._missed):
            return False
        chosen = self._chosen(row, wanted)
        if chosen is None:
            if phase != _PARKED:  # else for another row this one could have gone
                self._missed = wanted
            return False
        soft = wanted.tokens <= 0 and wanted.rows <= 0
        for gone in chosen:
            (draft.park if soft else draft.evict)(gone, why_gone(self._view, gone))
        settled = self._settled
        while self._first < len(settled) and draft.taken(settled[self._first][0]):
            self._first += 1
        return True

    def _chosen(self, row: int, wanted: _Wanted) -> list[int] | None:
        """Who is to go, best first; None if too few may."""
        tokens, places, rows, ahead_s, above = wanted
        soft = tokens <= 0 and rows <= 0
        chosen: list[int] = []
        for victim, spare_s, owned, is_running, weight in self._settled[self._first :]:
            if tokens <= 0 and places <= 0 and rows <= 0:
                break
            if spare_s < ahead_s and weight >= above:
                continue
            useful = tokens > 0 or rows > 0 or is_running
            if not useful or self._draft.taken(victim) or victim == row:
                continue
            chosen.append(victim)
            tokens -= owned
            places -= is_running
            rows -= 1
        return None if tokens > 0 or places > 0 or (rows > 0 and not soft) else chosen

    @cached_property
    def rank(self) -> Floats:
        """Of all rows: the lowest go first, those that have just come after all others."""
        rank: Floats = self._keys + 2 * _FAR_S * self._young
        return rank

    def in_turn(self, rows: Bools) -> Iterator[int]:
        """All of `rows`, which may go, lowest `rank` first; for who mostly needs only the first few."""
        rank = self.rank
        before = float(rank.min(where=rows & self._young, initial=np.inf))
        first = [row for row, *_ in self._settled if rows.item(row) and rank.item(row) < before]
        yield from first
        others = rows.copy()
        others[first] = False
        yield from ascending(rank, np.flatnonzero(others))

    def likeliest(self, count: int) -> list[int]:
        """Rows that would go first."""
        return [victim[0] for victim in islice(self._settled, count)]

    @cached_property
    def _settled(self) -> list[_Victim]:
        view = self._view
        best = lowest(self._keys, np.flatnonzero(self._old), _MOST)
        is_running = view.running.take(best)
        spare, owned, weight = (of.take(best).tolist() for of in (self._spare, view.owned, view.weight))
        return list(zip(best.tolist(), spare, owned, is_running.tolist(), weight, strict=True))

    @cached_property
    def _spare(self) -> Floats:
        return np.minimum(self._slack - self._costs, _FAR_S)

    @cached_property
    def _keys(self) -> Floats:
        view = self._view
        synced = view.synced / np.maximum(view.owned, 1)
        keys: Floats = -(self._spare + 0.5 * synced) / np.sqrt(view.weight)
        keys += _FAR_S * self._recent
        return keys
