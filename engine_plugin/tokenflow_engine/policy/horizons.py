"""Admission by demand within horizons: whether a newcomer can come in without a reader running dry.

For each horizon, the work that is due by then (tokens beyond each reader's lead, and prefills) must fit into
the time there is, at the batch size that memory allows with contexts as they will be half-way. A gate on the
sum of rates sees neither leads nor remaining lengths; no gate at all costs stalls of many seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Ints
from tokenflow_engine.policy.slack import Line

__all__ = ["HORIZONS_S", "Gate"]

HORIZONS_S = np.array([2.0, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])
"""Finer than powers of two: short answers end between those, and the work that is due is most just before
they do."""

_COMPANY = 8
"""So many always fit: no reader is promised more than it would get in such a batch, however fast it reads."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Which newcomers the engine can take on.

    `efficiency`: share of the modelled capacity that may be promised while streams have to take turns in
    memory; `efficiency_resident` while all have a place in the batch. `paused_share`: share of its rate that
    a paused reader is counted with, because it comes back. `keep_tokens`: lead that streams which take turns
    must still have at each horizon, to be away for a while.
    """

    efficiency: float
    efficiency_resident: float
    keep_tokens: float
    paused_share: float

    def passing(
        self, view: EngineView, inside: Bools, order: Ints, *, remaining: Floats, prefill: Line
    ) -> list[int]:
        """The rows of `order` that may come in, in that order. `inside`: readers' streams taken on already.

        A class competes with its own and heavier ones only: demand beyond capacity is refused to the lightest
        first, and what the light ones were promised does not hold back a heavier newcomer.
        """
        rows = np.concatenate([np.flatnonzero(inside), order])
        mean_context = float(view.context[rows].mean())
        company = min(_COMPANY, self._places(view, mean_context))
        most = 0.9 * self.efficiency_resident / view.costs.decode_s(company, company * mean_context)
        rate = np.minimum(view.rate, most) * np.where(view.paused, self.paused_share, 1.0)
        keep = self.keep_tokens if len(rows) > self._places(view, mean_context) else 0.0
        demand = _Demand.of(view, rows, remaining=remaining, prefill=prefill, rate=rate, keep=keep)
        first = len(rows) - len(order)
        weight = view.weight[rows]
        counted = np.zeros(len(rows))
        passed = np.zeros(len(rows), dtype=bool)
        for level in sorted(set(weight[first:].tolist()), reverse=True):
            counted[:first] = weight[:first] >= level
            candidates = first + np.flatnonzero(weight[first:] == level)
            count = self._largest(view, demand, counted, candidates)
            counted[candidates[:count]] = passed[candidates[:count]] = True
        rows_passed: list[int] = rows[passed].tolist()
        return rows_passed

    def _largest(self, view: EngineView, demand: _Demand, counted: Floats, candidates: Ints) -> int:
        """How many of `candidates`, from the first, fit in all horizons on top of those `counted`."""
        tokens, context, prefill = (
            np.cumsum(np.column_stack([column @ counted, column[:, candidates]]), axis=1)
            for column in (demand.tokens, demand.context, demand.prefill_s)
        )
        streams = int(counted.sum())
        low, high = 0, len(candidates)
        while low < high:
            middle = high if low == 0 and high == len(candidates) else (low + high + 1) // 2
            if self._fits(view, tokens[:, middle], context[:, middle], prefill[:, middle], streams + middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _fits(
        self, view: EngineView, tokens: Floats, context: Floats, prefill_s: Floats, streams: int
    ) -> bool:
        for due, weighted, prefill, horizon in zip(
            tokens.tolist(), context.tolist(), prefill_s.tolist(), HORIZONS_S.tolist(), strict=True
        ):
            needed_s, efficiency = prefill, self.efficiency
            if due > 0.0:
                mean_context = max(weighted / due, 1.0) + view.page_tokens / 2
                places = self._places(view, mean_context)
                batch = min(streams, places)
                if streams <= places:
                    efficiency = self.efficiency_resident
                else:
                    needed_s += due * view.costs.turn_s / batch
                needed_s += due * view.costs.decode_s(batch, batch * mean_context) / batch
            if needed_s > efficiency * horizon:
                return False
        return True

    @staticmethod
    def _places(view: EngineView, mean_context: float) -> int:
        """Streams that can be in the batch at one time."""
        return max(int(min(view.max_running, view.kv_tokens / mean_context)), 1)


@dataclass(frozen=True, slots=True)
class _Demand:
    """Within each horizon (first axis), of each row (second axis)."""

    tokens: Floats
    """To be generated, so that its reader does not run dry."""
    context: Floats
    """Its context half-way, times `tokens`: summed and divided by the tokens, the mean that memory must hold.
    """
    prefill_s: Floats

    @classmethod
    def of(
        cls,
        view: EngineView,
        rows: Ints,
        *,
        remaining: Floats,
        prefill: Line,
        rate: Floats,
        keep: float,
    ) -> _Demand:
        left = remaining[rows]
        read = HORIZONS_S[:, None] * rate[rows]
        tokens = np.maximum(np.minimum(read + (keep - view.buffered[rows]), left), 0.0)
        read *= 0.5
        context = np.minimum(read, left, out=read)
        context += view.context[rows]
        context *= tokens
        missing = view.prefill[rows].astype(np.float64)
        prefill_s = np.where(missing > 0, prefill.of(missing), 0.0)
        # A prefill is cut into chunks between decode steps: one longer than a horizon does not fill it.
        return cls(tokens, context, np.minimum(prefill_s, HORIZONS_S[:, None] / 2))
