"""Admission by demand within horizons: whether a newcomer can come in without a reader running dry.

For each horizon, the work that is due by then (tokens beyond each reader's lead, and prefills) must fit into
the time there is, at the batch size that memory allows with contexts as they will be half-way. A gate on the
sum of rates sees neither leads nor remaining lengths; no gate at all costs stalls of many seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import local

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
_COMPANY = 8
"""So many always fit: no reader is promised more than it would get in such a batch, however fast it reads."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Which newcomers the engine can take on.

    `efficiency`: share of the modelled capacity that may be promised. `paused_share`: share of its rate that
    a paused reader is counted with, because it comes back. `keep_s`: how long one turn in memory lasts.
    Readers must still have a lead for the turns of others at each horizon at which there are any.
    """

    efficiency: float
    keep_s: float
    paused_share: float

    def passing(
        self, view: EngineView, inside: Bools, order: Ints, *, remaining: Floats, prefill: Line
    ) -> list[int]:
        """The rows of `order` that may come in, in that order. `inside`: readers' streams taken on already.

        A class competes with its own and heavier ones only: demand beyond capacity is refused to the lightest
        first, and what the light ones were promised does not hold back a heavier newcomer.
        """
        rows = np.concatenate([np.flatnonzero(inside), order])
        mean_context = float(view.context.take(rows).sum()) / len(rows)
        company = min(_COMPANY, self._places(view, mean_context))
        most = 0.9 * self.efficiency / view.costs.decode_s(company, company * mean_context)
        rate = np.minimum(view.rate, most)
        rate[view.paused] *= self.paused_share
        demand = _demand(
            view,
            rows,
            remaining=remaining,
            prefill=prefill,
            rate=rate,
            keep_s=self.keep_s,
            streams=len(rows) - len(order) + 1,
        )
        first = len(rows) - len(order)
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

    def _largest(self, view: EngineView, demand: Floats, counted: Floats, candidates: Ints) -> int:
        """How many of `candidates`, from the first, fit in all horizons on top of those `counted`."""
        sums = np.empty((*demand.shape[:2], len(candidates) + 1))
        np.matmul(demand, counted, out=sums[:, :, 0])
        sums[:, :, 1:] = demand.take(candidates, axis=2)
        sums.cumsum(axis=2, out=sums)
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
        """`sums`: of the demand of so many streams, within each horizon."""
        for due, weighted, prefill_s, horizon in zip(*sums.tolist(), _HORIZONS, strict=True):
            needed_s = prefill_s
            if due > 0.0:
                mean_context = max(weighted / due, 1.0) + view.page_tokens / 2
                places = self._places(view, mean_context)
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


def _demand(
    view: EngineView,
    rows: Ints,
    *,
    remaining: Floats,
    prefill: Line,
    rate: Floats,
    keep_s: float,
    streams: int,
) -> Floats:
    """Within each horizon (second axis), of each row (third axis), three things.

    Tokens to be generated, so that its reader does not run dry. Its context half-way, times those tokens:
    summed and divided by the tokens, the mean that memory must hold. And seconds of prefill.
    """
    planes = _planes(len(rows))
    tokens, context, prefill_s = planes
    prefill_s[:] = 0.0
    left, rates = remaining.take(rows), rate.take(rows)
    np.multiply(_HALVES_S, rates, out=context)
    np.minimum(context, left, out=context)
    context += view.context.take(rows)
    # Contexts grow: streams that all fit when they are let in take turns later on.
    turns = streams / np.minimum(view.kv_tokens / context.mean(axis=1), view.max_running) - 1.0
    keep = np.where(turns > 0, keep_s * np.maximum(turns, 1.0), 0.0)
    np.multiply((HORIZONS_S + keep)[:, None], rates, out=tokens)
    tokens -= view.buffered.take(rows)
    np.minimum(tokens, left, out=tokens)
    np.maximum(tokens, 0.0, out=tokens)
    context *= tokens
    missing = view.prefill.take(rows)
    to_prefill = np.flatnonzero(missing)
    seconds = prefill.of(missing[to_prefill])
    # A prefill is cut into chunks between decode steps: one longer than a horizon does not fill it.
    prefill_s[:, to_prefill] = np.minimum(seconds, _HALVES_S)
    return planes


def _planes(rows: int) -> Floats:
    """Three times one number for each horizon and row, until the next call in this thread.

    Fresh memory of this size comes from the kernel page by page, which takes longer than all the sums.
    """
    size = 3 * len(_HORIZONS) * rows
    room: Floats | None = getattr(_scratch, "room", None)
    if room is None or len(room) < size:
        room = _scratch.room = np.empty(2 * size)
    return room[:size].reshape(3, len(_HORIZONS), rows)
