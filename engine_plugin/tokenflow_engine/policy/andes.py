"""Andes (arXiv 2404.16283 v2): the batch that gains most quality of experience per token of memory.

Faithful in what decides: QoE gain over a prediction horizon, choice of the batch size, greedy packing by gain
over context length, a refiner that admits one (admit, preempt) pair at a time, triggers on memory and on
token latency. Given, as every policy here, a host tier: preempted streams come back by a load, not by a
prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Plan, Reason
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.room import free_memory, wake
from tokenflow_engine.policy.rows import lowest, lowest_first
from tokenflow_engine.policy.slack import Line, return_costs
from tokenflow_engine.policy.ticks import Ticks
from tokenflow_engine.policy.turns import Turns

__all__ = ["Andes"]

_BATCH_SIZES = 6
"""Tried between the largest that serves the tightest reader in time and the largest that memory holds."""


class Andes:
    """``QoE = 1 - S_delay / S_whole``: areas between the actual and the ideal consumption timeline.

    A request's gain is the QoE it loses within `horizon_s` if it waits, less what it loses if it is served.
    Ours: `least_gain` is the QoE that a pair must gain beyond its overhead: without it the refiner swaps five
    times as much, for nothing. And ranks have no term for waiting: who has been outside for `starving_s` gets
    its turn and stays for `stay_s` (`Turns` states the bound).
    """

    name = "andes"

    def __init__(
        self,
        *,
        horizon_s: float = 30.0,
        interval_s: float = 0.5,
        occupancy: float = 0.9,
        pairs: int = 16,
        least_gain: float = 0.01,
        starving_s: float = 30.0,
        stay_s: float = 2.0,
    ) -> None:
        self._turns = Turns(after_s=starving_s, stay_s=stay_s)
        self._least_gain = least_gain
        self._horizon_s = horizon_s
        self._interval_s = interval_s
        self._occupancy = occupancy
        self._pairs = pairs
        self._ticks = Ticks(interval_s)

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        """See `Policy.plan`."""
        out = view.outside
        away = view.preempted
        if not out.any() or (view.machine.all() and not away.any()):
            return Plan(stock=True, next_at=view.now + self._interval_s)
        draft = Draft(view, steps=4)
        tick = self._ticks.due(view.now)
        swaps = draft.soon < 0 or (tick and self._triggered(view))
        late = self._turns.next(view)
        if swaps or late is not None:
            chosen, gain = self._best(view)
            kept = chosen + 2.0 * self._turns.stays(view)
            free_memory(draft, lowest_first(gain + (gain.max() + 1.0) * kept))
            if (late is None or self._turns.give(draft, late, gain)) and swaps:
                self._swap(view, draft, chosen, gain)
        here = view.parked
        lines = [np.flatnonzero(rows) for rows in (here, away & ~here, out & ~away)]
        for line, reason in zip(lines, (Reason.RESUMED, Reason.RESUMED, Reason.ADMITTED), strict=True):
            for row in line.tolist():
                if not draft.taken(row) and not draft.bring(row, reason):
                    break
        draft = wake(draft, np.concatenate(lines))
        return draft.finish(next_at=min(self._ticks.next_at, draft.full_at()))

    def _triggered(self, view: EngineView) -> bool:
        """Memory nearly full (or batch places), or tokens slower than the tightest reader."""
        inside = view.in_batch
        batch = int(inside.sum())
        if not batch or view.kv_free < (1.0 - self._occupancy) * view.kv_tokens or batch >= view.max_running:
            return True
        waiting = float(view.prefill[view.outside].sum())
        if waiting > view.kv_free - (1.0 - self._occupancy) * view.kv_tokens:
            return True
        step_s = view.costs.decode_s(batch, float(view.context[inside].sum()))
        return bool(step_s * view.rate[inside].max() > 1.0)

    def _swap(self, view: EngineView, draft: Draft, chosen: Bools, gain: Floats) -> None:
        """The best batch of the best size, reached by pairs that pay for themselves."""
        leaving = view.running & ~chosen & view.may_park & ~self._turns.stays(view)
        leaving[list(draft.plan.reasons)] = False
        first = lowest(-gain, np.flatnonzero(view.outside & chosen), self._pairs).tolist()
        last = lowest(gain, np.flatnonzero(leaving), 4 * self._pairs).tolist()
        costs = return_costs(
            view, load=Line.through(view.costs.load_s), prefill=Line.through(view.costs.prefill_s)
        )
        for row in first:
            if draft.taken(row):
                continue
            victims: list[int] = []
            needed = draft.needs(row) - draft.soon
            places = 1 - min(draft.places, draft.rows)
            worth = float(gain[row])
            while (needed > 0 or places > 0) and last:
                victim = last.pop(0)
                victims.append(victim)
                needed -= int(view.owned[victim])
                places -= 1
                worth -= float(gain[victim])
            if needed > 0 or places > 0:
                last = victims + last
                continue
            if worth <= self._least_gain + self._overhead(view, float(costs[row])):
                break
            for victim in victims:
                draft.evict(victim, Reason.AHEAD)
            if not draft.bring(row, Reason.URGENT):
                draft.hold(row, Reason.NO_ROOM)

    def _best(self, view: EngineView) -> tuple[Bools, Floats]:
        """Of all batch sizes, the batch with the most total gain; and each row's gain at that size."""
        order_of_length = np.sort(view.context)
        most = int(np.searchsorted(np.cumsum(order_of_length), view.kv_tokens, side="right"))
        most = max(min(most, view.max_running, len(view)), 1)
        mean_context = float(view.context.mean())
        least = most
        while least > 1 and view.costs.decode_s(least, least * mean_context) * float(view.rate.max()) > 1.0:
            least -= max(least // 8, 1)
        best: tuple[float, Bools, Floats] | None = None
        fixed = view.in_batch & (~view.running | ~view.may_park)
        for batch in sorted(set(np.linspace(least, most, _BATCH_SIZES).astype(int).tolist())):
            gain = self._gains(view, view.costs.decode_s(batch, batch * mean_context))
            value = np.where(fixed, np.inf, gain / np.maximum(view.context, 1))
            order = np.argsort(-value, kind="stable")
            fits = np.cumsum(view.context[order]) <= view.kv_tokens
            rows = order[fits][:batch]
            total = float(gain[rows].sum())
            if best is None or total > best[0]:
                chosen = np.zeros(len(view), dtype=bool)
                chosen[rows] = True
                best = (total, chosen, gain)
        assert best is not None, "at least one batch size is tried"
        return best[1], best[2]

    def _gains(self, view: EngineView, step_s: float) -> Floats:
        """QoE that each row gains within the horizon by being served at one token a `step_s`.

        The reader's lag, integrated: a waiting one falls behind once its buffer has run out; a served one
        only as far as the engine is slower than it reads. Lag from the past is in both and cancels.
        """
        horizon = self._horizon_s
        speed = 1.0 / step_s
        waits = np.maximum(horizon - view.buffered / view.rate, 0.0)
        falls = np.maximum(view.rate - speed, 0.0)
        dry_in = view.buffered / np.maximum(falls, 1e-9)
        lost_waiting = 0.5 * view.rate * waits**2
        lost_served = 0.5 * falls * np.maximum(horizon - dry_in, 0.0) ** 2
        whole = 0.5 * view.rate * (view.now - view.arrived + horizon) ** 2
        gain = view.weight * (lost_waiting - lost_served) / whole
        return np.where(view.paused & view.started, 0.0, gain)

    def _overhead(self, view: EngineView, seconds: float) -> float:
        """QoE that the running requests lose if nothing is generated for `seconds`."""
        rows = view.running & ~view.paused
        rate, buffered, arrived = view.rate[rows], view.buffered[rows], view.arrived[rows]
        lost = 0.5 * rate * np.maximum(seconds - buffered / rate, 0.0) ** 2
        return float((lost / (0.5 * rate * (view.now - arrived + self._horizon_s) ** 2)).sum())
