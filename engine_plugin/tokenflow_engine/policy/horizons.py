"""Admission by demand within horizons: whether a newcomer can come in without a reader running dry.

For each horizon, the work that is due by then (tokens beyond each reader's lead, and prefills) must fit into
the time there is, at the batch size that memory allows with contexts as they will be half-way, and in which a
stream is as fast as the fastest of the readers needs it. A gate on the sum of rates sees neither leads nor
remaining lengths; no gate at all costs stalls of many seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import local
from typing import NamedTuple

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Ints
from tokenflow_engine.policy.slack import Line

__all__ = ["HORIZONS_S", "Gate"]

HORIZONS_S = np.array([2.0, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])
"""Finer than powers of two: short answers end between those, and the work that is due is most just before
they do."""

_HORIZONS = HORIZONS_S.tolist()
_HALVES_S = HORIZONS_S[:, None] / 2
_scratch = local()
_NARROWEST = 0.6
"""Of what a full batch makes, the least that one makes which is kept small for a fast reader. Whoever reads
faster than such a small one writes is promised only what a full one gives."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Which newcomers the engine can take on.

    `efficiency`: share of the modelled capacity that may be promised. `paused_share`: share of its rate that
    a paused reader is counted with, because it comes back. `keep_s`: how long one turn in memory lasts.
    Readers must still have a lead for the turns of others at each horizon at which there are any. `yields_s`:
    so long after it came, who reads faster than a full batch writes lets others go first.
    """

    efficiency: float
    keep_s: float
    paused_share: float
    yields_s: float

    def passing(
        self, view: EngineView, inside: Bools, order: Ints, *, remaining: Floats, prefill: Line
    ) -> list[int]:
        """The rows of `order` that may come in, in that order. `inside`: readers' streams taken on already.

        A class competes with its own and heavier ones only: demand beyond capacity is refused to the lightest
        first, and what the light ones were promised does not hold back a heavier newcomer.
        """
        rows = np.concatenate([np.flatnonzero(inside), order])
        first = len(rows) - len(order)
        halfway = float(view.context.take(rows).sum() + remaining.take(rows).sum() / 2) / len(rows)
        rate, full_s = self._promised(view, rows, halfway)
        yields = rate[first:] * full_s > 1.0
        if yields.any():
            yields &= view.now - view.arrived.take(order) < self.yields_s
            later = first + yields.argsort(kind="stable")
            rows[first:], rate[first:] = rows.take(later), rate.take(later)
        np.multiply(rate, self.paused_share, out=rate, where=view.paused.take(rows))
        demand = _Demand.of(
            view,
            rows,
            remaining=remaining,
            prefill=prefill,
            rate=rate,
            keep_s=self.keep_s,
            streams=first + 1,
        )
        weight = view.weight.take(rows)
        counted = np.zeros(len(rows))
        passed = np.zeros(len(rows), dtype=bool)
        for level in sorted(set(weight[first:].tolist()), reverse=True):
            counted[:first] = weight[:first] >= level
            candidates = first + np.flatnonzero(weight[first:] == level)
            count = self._largest(view, demand, counted, candidates)
            counted[candidates[:count]] = passed[candidates[:count]] = True
        rows_passed: list[int] = rows[passed].tolist()
        return rows_passed

    def _promised(self, view: EngineView, rows: Ints, mean_context: float) -> tuple[Floats, float]:
        """The rate that each of `rows` is counted with, and a step of a full batch.

        With b of its B streams a batch makes a share of what a full one makes: b / (base + b slope), of
        B / (base + B slope). Solved for b / B where that share is `_NARROWEST`.
        """
        places = self._places(view, mean_context)
        full_s, base_s = view.costs.decode_s(places, places * mean_context), view.costs.decode_s(0, 0.0)
        narrowest = _NARROWEST * base_s / (full_s - _NARROWEST * (full_s - base_s))
        shortest_s = base_s + narrowest * (full_s - base_s)
        rate = view.rate.take(rows)
        np.minimum(rate, 1.0 / full_s, out=rate, where=rate * shortest_s > 1.0)
        return rate, full_s

    def _largest(self, view: EngineView, demand: _Demand, counted: Floats, candidates: Ints) -> int:
        """How many of `candidates`, from the first, fit in all horizons on top of those `counted`."""
        sums = np.empty((4, len(_HORIZONS), len(candidates) + 1))
        np.matmul(demand.planes, counted, out=sums[:2, :, 0])
        sums[:2, :, 1:] = demand.planes.take(candidates, axis=2)
        np.matmul(demand.prefill_s, counted[demand.prefilled :], out=sums[2, :, 0])
        sums[2, :, 1:] = demand.prefill_s.take(candidates - demand.prefilled, axis=1)
        pace, tokens = sums[3], demand.planes[0]
        (tokens * counted).max(axis=1, out=pace[:, 0])
        pace[:, 1:] = sums[0, :, 1:]
        np.maximum.accumulate(pace, axis=1, out=pace)
        pace /= demand.within_s[:, None]
        sums[:3].cumsum(axis=2, out=sums[:3])
        streams = int(counted.sum())
        low, high = 0, len(candidates)
        while low < high:
            middle = high if low == 0 and high == len(candidates) else (low + high + 1) // 2
            if self._fits(view, sums[:, :, middle], streams + middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _fits(self, view: EngineView, sums: Floats, streams: int) -> bool:
        """`sums`: of the demand of so many streams, within each horizon; and the fastest of their paces."""
        for due, weighted, prefill_s, pace, horizon in zip(*sums.tolist(), _HORIZONS, strict=True):
            needed_s = prefill_s
            if due > 0.0:
                mean_context = max(weighted / due, 1.0) + view.page_tokens / 2
                places = self._places(view, mean_context)
                full_s = view.costs.decode_s(places, places * mean_context)
                if full_s * pace > 1.0:
                    places = self._narrowed(view, places, full_s, pace)
                batch = min(streams, places)
                if streams > places:
                    needed_s += due * view.costs.turn_s / batch
                needed_s += due * view.costs.decode_s(batch, batch * mean_context) / batch
            if needed_s > self.efficiency * horizon:
                return False
        return True

    @staticmethod
    def _places(view: EngineView, mean_context: float) -> int:
        """Streams that can be in the batch at one time."""
        return max(int(min(view.max_running, view.kv_tokens / mean_context)), 1)

    @staticmethod
    def _narrowed(view: EngineView, places: int, full_s: float, pace: float) -> int:
        """Of so many places, in all of which a step takes `full_s`, those in which it takes 1 / `pace`."""
        base_s = view.costs.decode_s(0, 0.0)
        if base_s * pace >= 1.0:
            return places
        return max(int(places * (1.0 / pace - base_s) / (full_s - base_s)), 1)


class _Demand(NamedTuple):
    """What rows ask of the engine within each horizon."""

    planes: Floats
    """By horizon and row: tokens to be generated, so that its reader does not run dry; and its context
    half-way, times those tokens: summed and divided by the tokens, the mean that memory must hold."""
    prefill_s: Floats
    """By horizon and row, of the last rows: those from `prefilled` on. The others need no prefill."""
    prefilled: int
    within_s: Floats
    """For each horizon, the seconds in which those tokens are to be generated: a turn longer than it."""

    @classmethod
    def of(
        cls,
        view: EngineView,
        rows: Ints,
        *,
        remaining: Floats,
        prefill: Line,
        rate: Floats,
        keep_s: float,
        streams: int,
    ) -> _Demand:
        """`rate`: that with which each row is counted."""
        tokens, context = planes = _planes(len(rows))
        left = remaining.take(rows)
        np.multiply(_HALVES_S, rate, out=context)
        np.minimum(context, left, out=context)
        context += view.context.take(rows)
        # Contexts grow: streams that all fit when they are let in take turns later on.
        places = np.minimum(view.kv_tokens / (context.sum(axis=1) / len(rows)), view.max_running)
        turns = streams / places - 1.0
        keep = np.where(turns > 0, keep_s * np.maximum(turns, 1.0), 0.0)
        within_s = HORIZONS_S + keep
        np.multiply(within_s[:, None], rate, out=tokens)
        tokens -= view.buffered.take(rows)
        np.minimum(tokens, left, out=tokens)
        np.maximum(tokens, 0.0, out=tokens)
        context *= tokens
        missing = view.prefill.take(rows)
        prefilled = min(int((missing > 0).argmax()), streams - 1)
        missing = missing[prefilled:]
        # A prefill is cut into chunks between decode steps: one longer than a horizon does not fill it.
        prefill_s = np.minimum(prefill.of(missing) * (missing > 0), _HALVES_S)
        return cls(planes, prefill_s, prefilled, within_s)


def _planes(rows: int) -> Floats:
    """Twice one number for each horizon and row, until the next call in this thread.

    Fresh memory of this size comes from the kernel page by page, which takes longer than all the sums.
    """
    size = 2 * len(_HORIZONS) * rows
    room: Floats | None = getattr(_scratch, "room", None)
    if room is None or len(room) < size:
        room = _scratch.room = np.empty(2 * size)
    return room[:size].reshape(2, len(_HORIZONS), rows)
