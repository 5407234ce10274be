"""TokenFlow's own scheduler (EuroSys '26, arXiv 2510.02758), as its paper gives it, for comparison.

Every `interval_s`, and only under stress: first how many requests share the device (the working set), then
which of them hold its memory (utility, greedy, swaps). Two readings of ours: rank by the *marginal* utility
(the paper's formula taken literally ranks a nearly empty request low), and test for admission the buffers of
those displaced (a newcomer has none). When readers want more than the engine gives, it falls back to first
come, first served.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Ints, Phase, Plan, Reason
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.room import free_memory, wake
from tokenflow_engine.policy.rows import lowest, lowest_first
from tokenflow_engine.policy.slack import Line, expected_remaining, return_costs, slacks
from tokenflow_engine.policy.ticks import Ticks
from tokenflow_engine.policy.turns import Turns

__all__ = ["TokenFlow"]

_MOST = 64


class TokenFlow:
    """`conservativeness` is the paper's mu, `gamma` and `value` weigh buffer against progress.

    A preempted request that runs dry has the largest marginal utility, so it is chosen at the next tick at
    which a running one holds a buffer. In the fallback, preempted requests come before newcomers, in order of
    arrival. Whoever is first in line and does not fit keeps those behind it out until it does, so that small
    requests cannot starve a large one; only parked ones, which need next to nothing, go before it. Ours: who
    has been outside for `starving_s` all the same, as machines may be, gets its turn and stays for `stay_s`
    (`Turns` states the bound).
    """

    name = "tokenflow"

    def __init__(
        self,
        *,
        interval_s: float = 0.5,
        conservativeness: float = 1.5,
        gamma: float = 1.0,
        value: float = 0.1,
        critical_s: float = 1.0,
        starving_s: float = 30.0,
        stay_s: float = 2.0,
    ) -> None:
        self._interval_s = interval_s
        self._mu = conservativeness
        self._gamma = gamma
        self._value = value
        self._critical_s = critical_s
        self._ticks = Ticks(interval_s)
        self._turns = Turns(after_s=starving_s, stay_s=stay_s)

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        """See `Policy.plan`."""
        out = view.outside
        away = view.preempted
        if not out.any() or (view.machine.all() and not away.any()):
            return Plan(stock=True, next_at=view.now + self._interval_s)
        draft = Draft(view, steps=4)
        tick = self._ticks.due(view.now)
        if self._overloaded(view):
            if not away.any():
                return Plan(stock=True, next_at=self._ticks.next_at)
            line = _line(view, away, view.arrived)
            self._first_come(view, draft, line)
            return wake(draft, line).finish(
                next_at=min(self._ticks.next_at, draft.full_at()), why_waiting=Reason.OVERLOAD
            )
        late = self._turns.next(view)
        if tick or draft.soon < 0 or late is not None:
            self._balance(view, draft, late)
        line = _line(view, away, slacks(view, patience_s=self._critical_s))
        _fill(draft, line)
        draft = wake(draft, line)
        return draft.finish(next_at=min(self._ticks.next_at, draft.full_at()))

    def _overloaded(self, view: EngineView) -> bool:
        """``sum r_i > Gamma``, with Gamma what the engine gives with its memory full."""
        contexts = view.context
        mean_context = max(float(contexts.mean()), 1.0)
        batch = max(min(int(view.kv_tokens / mean_context), view.max_running, len(view)), 1)
        gamma = batch / view.costs.decode_s(batch, batch * mean_context)
        return bool(view.rate[view.read].sum() > gamma)

    def _first_come(self, view: EngineView, draft: Draft, line: Ints) -> None:
        """The paper's fallback. Memory-aware: room for half of what all are expected to generate."""
        free_memory(draft, lowest_first(-view.arrived))
        remaining = expected_remaining(view, tail=0.0)
        growth = float(remaining[view.in_batch].sum())
        waiting = view.phase == Phase.WAITING
        for row in line.tolist():
            if draft.taken(row):
                continue
            if waiting[row]:
                growth += float(remaining[row])
                if draft.free - draft.needs(row) < 0.5 * growth:
                    return
            if not draft.bring(row, Reason.ADMITTED if waiting[row] else Reason.RESUMED):
                return

    def _balance(self, view: EngineView, draft: Draft, late: int | None) -> None:
        """Steps 1 and 2 of one tick, after `late` has had its turn."""
        utility = self._marginal(view)
        stays = self._turns.stays(view)
        free_memory(draft, lowest_first(utility + (utility.max() + 1.0) * stays))
        if late is not None and not self._turns.give(draft, late, utility):
            return
        load, prefill = Line.through(view.costs.load_s), Line.through(view.costs.prefill_s)
        back = return_costs(view, load=load, prefill=prefill)
        must_hold = self._mu * view.rate * (view.costs.evict_s(0.0) + back + self._interval_s)
        spare = view.running & view.may_park & (view.buffered >= must_hold)
        spare |= view.running & view.may_park & (view.machine | view.paused)
        spare &= ~stays
        victims = lowest(utility, np.flatnonzero(spare), 2 * _MOST).tolist()
        admitted = self._working_set(view)
        critical = view.started & ~view.machine & (view.buffered < must_hold + view.rate * self._critical_s)
        wanted = view.outside & (critical | admitted)
        for row in lowest(-utility, np.flatnonzero(wanted), _MOST).tolist():
            if draft.taken(row):
                continue
            swapped: list[int] = []
            needed, places = draft.needs(row) - draft.soon, 1 - min(draft.places, draft.rows)
            while (needed > 0 or places > 0) and victims and utility[victims[0]] < utility[row]:
                victim = victims.pop(0)
                if draft.taken(victim):
                    continue
                swapped.append(victim)
                needed -= int(view.owned[victim])
                places -= 1
            if needed > 0 or places > 0:
                break
            for victim in swapped:
                draft.evict(victim, Reason.AHEAD)
            if not draft.bring(row, Reason.URGENT if view.started[row] else Reason.ADMITTED):
                draft.hold(row, Reason.NO_ROOM)
        dirty = view.synced < view.owned
        draft.plan.write = [row for row in victims if dirty[row] and not draft.taken(row)]
        for row in draft.plan.write:
            draft.plan.reasons.setdefault(row, Reason.AHEAD)

    def _working_set(self, view: EngineView) -> Bools:
        """Waiting requests that may share the device: the queue's head, as far as the working set has room.

        `W = floor(M / beta)` is a limit on those that hold memory at one time; scaled toward the number
        running, so that it grows by half of what is missing per tick, and by at least one.
        """
        inside = int(view.in_batch.sum())
        footprint = max(float(view.context.mean()), 1.0)
        static = min(int(view.kv_tokens / footprint), view.max_running)
        room = max((max(static - inside, 0) + 1) // 2, 1)
        displaceable = int((view.running & (view.buffered > self._mu * view.rate * self._critical_s)).sum())
        admitted = np.zeros(len(view), dtype=bool)
        admitted[np.flatnonzero(view.phase == Phase.WAITING)[: room + displaceable]] = True
        return admitted

    def _marginal(self, view: EngineView) -> Floats:
        """What serving until the next tick gains against not serving; `phi(b) = exp(-b)`, b in seconds."""
        horizon = self._interval_s
        batch = max(int(view.running.sum()), 1)
        speed = 1.0 / view.costs.decode_s(batch, float(view.context[view.running].sum()))
        read = np.where(view.paused, 0.0, view.rate * horizon)
        unserved = np.maximum(view.buffered - read, 0.0) / view.rate
        served = np.maximum(view.buffered + speed * horizon - read, 0.0) / view.rate
        gain = self._value * horizon + self._gamma * (np.exp(-unserved) - np.exp(-served))
        return np.where((view.paused & view.started) | view.machine, 0.0, view.weight * gain)


def _line(view: EngineView, away: Bools, rank: Floats) -> Ints:
    """Who comes next: of those preempted the lowest `rank`, parked ones first; then the queue."""
    at_once = view.parked & ~view.paused
    return np.concatenate(
        [
            lowest(rank, np.flatnonzero(at_once), len(view)),
            lowest(rank, np.flatnonzero(away & ~at_once), len(view)),
            np.flatnonzero(view.phase == Phase.WAITING)[:_MOST],
        ]
    )


def _fill(draft: Draft, line: Ints) -> None:
    """Free memory goes to who is critical, then to the queue."""
    waiting = draft.view.phase == Phase.WAITING
    for row in line.tolist():
        reason = Reason.ADMITTED if waiting[row] else Reason.RESUMED
        if not draft.taken(row) and not draft.bring(row, reason):
            return
