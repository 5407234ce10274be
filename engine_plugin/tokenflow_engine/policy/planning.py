"""One plan of the policy that ships, step by step.

In order of what is least to be missed: memory for the next steps; started streams whose readers would run
dry; newcomers, as far as demand within horizons allows (`horizons`); machines that have waited long; then,
with what is left, whoever is outside. Each takes free room first, and then the place of streams that are far
enough ahead (`victims`).
"""

from __future__ import annotations

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Ints, Phase, Place, Plan, Reason
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.horizons import Gate
from tokenflow_engine.policy.options import Options
from tokenflow_engine.policy.passes import prefill_budget
from tokenflow_engine.policy.rows import lowest, outside, running, started
from tokenflow_engine.policy.slack import Line, expected_remaining, return_costs, slacks, urgencies
from tokenflow_engine.policy.victims import Victims

__all__ = ["Planning"]

_INFINITY = float("inf")
_PASSES_AHEAD = 4
"""Newcomers are let in for so many passes; by then there is another plan."""
_LEAST_S, _LEAST_STEPS = 0.02, 2.0
"""Between two plans, unless something happens: what one has ordered takes a step or two to happen."""
_STEPS_AHEAD = 6
"""Memory is kept for so many steps: until one is evicted, and what of it the host lacks is copied."""
_WRITTEN = 16
"""Streams whose KV one plan has written ahead."""


class Planning:
    """What is known of one view, and the plan as it grows; used once."""

    def __init__(self, view: EngineView, options: Options) -> None:
        self.view, self.options = view, options
        self.running = running(view)
        self.outside = outside(view)
        self.started = started(view)
        self.load = Line.through(view.costs.load_s)
        self.prefill = Line.through(view.costs.prefill_s)
        self.batch = int(self.running.sum())
        self.step_s = view.costs.decode_s(max(self.batch, 1), float(view.context[self.running].sum()))
        self.slack = slacks(view, patience_s=options.patience_s)
        self.urgency = urgencies(view, self.slack)
        self.costs = return_costs(view, load=self.load, prefill=self.prefill)
        self.remaining = expected_remaining(view, tail=options.tail)
        self.pass_tokens = self._pass_tokens()
        self.capped = self._beyond_cap()
        self.draft = Draft(view, steps=_STEPS_AHEAD)
        self.victims = Victims(view, self.draft, self.slack, self.costs, least_s=options.least_s)
        self.next_at = _INFINITY
        self.overload = False
        self.target_s = _INFINITY
        """Longest step that the tightest reader in the batch can bear."""

    def plan(self) -> Plan:
        """The steps, most urgent first."""
        self._free_memory()
        self._return_due()
        self._admit_newcomers()
        self._serve_machines()
        self._cap_leads()
        self._quicken()
        self._refill()
        self._size_passes()
        self._write_ahead()
        why = Reason.OVERLOAD if self.overload else Reason.NO_ROOM
        self._again_in(self.draft.full_at() - self.view.now)
        return self.draft.finish(next_at=self.next_at, why_waiting=why)

    def _free_memory(self) -> None:
        """The batch's next steps come before everything else."""
        if self.draft.soon >= 0:
            return
        for victim in self.victims.for_memory():
            self.draft.evict(victim, Reason.MEMORY)
            if self.draft.soon >= 0:
                return

    def _return_due(self) -> None:
        """Started streams whose readers would run dry before a later plan could bring them back."""
        view, options = self.view, self.options
        out = self.outside & self.started & ~view.machine
        if not out.any():
            return
        due_in = self.slack - self.costs - self.step_s - options.margin_s
        later = due_in[out & (due_in > 0)]
        if len(later):
            self._again_in(float(later.min()))
        for row in self._first(out & (due_in <= 0)):
            starving = self.slack[row] <= 0 and view.now - view.since[row] >= options.starving_s
            ahead_s = max(float(self.slack[row]), 0.0) + view.costs.evict_s(0.0) + options.ahead_s
            dry = bool(self.slack[row] <= 0)
            self._place(row, Reason.URGENT, ahead_s=-_INFINITY if starving else ahead_s, relegate=dry)

    def _admit_newcomers(self) -> None:
        """Those that the gate lets in, as far as they can be prefilled soon."""
        view, options = self.view, self.options
        new = self.outside & ~self.started & ~view.machine
        if not new.any():
            return
        order = np.array(self._first(new), dtype=np.int64)
        inside = (self.started | ~self.outside) & ~view.machine
        passing = order.tolist()
        all_fit = self._nobody_takes_turns()
        if inside.any() and not all_fit:
            gate = Gate(
                efficiency=options.efficiency,
                efficiency_resident=options.efficiency_resident,
                keep_tokens=options.keep_tokens,
                paused_share=options.paused_share,
            )
            passing = gate.passing(view, inside, order, remaining=self.remaining, prefill=self.prefill)
            self.overload = len(passing) < len(order)
        budget = _INFINITY if all_fit else self.prefill.within(options.prefill_ahead_s)
        if self.pass_tokens is not None:
            budget = min(budget, _PASSES_AHEAD * self.pass_tokens)
        for row in passing:
            if budget <= 0:
                break
            late = self.slack[row] < 0
            if self._place(row, Reason.ADMITTED, ahead_s=options.ahead_s, relegate=late):
                budget -= int(view.prefill[row])
        self._again_in(options.poll_s)

    def _nobody_takes_turns(self) -> bool:
        """All there are fit to their ends, and none is of more weight: keeping some out would help nobody.

        What they want beyond the engine's speed, each lacks a little of. Of several classes the lightest is
        kept out instead.
        """
        view = self.view
        if len(view) > view.max_running or bool((view.weight != view.weight[0]).any()):
            return False
        whole = float((view.context + self.remaining).sum()) + len(view) * view.page_tokens
        return whole <= self.options.ample_whole * view.kv_tokens

    def _serve_machines(self) -> None:
        """Machines that have been patient take a place as a reader would: from streams that are ahead."""
        view, options = self.view, self.options
        out = self.outside & view.machine
        if not out.any():
            return
        for row in self._first(out & (self.slack <= 0)):
            starving = view.now - view.since[row] >= options.patience_s + options.starving_s
            self._place(row, Reason.URGENT, ahead_s=-_INFINITY if starving else options.ahead_s)
        self._again_in(options.poll_s)

    def _cap_leads(self) -> None:
        """While somebody waits, streams beyond the cap make way for the rest of the batch."""
        if not self.capped.any():
            return
        for row in np.flatnonzero(self.capped & self.running & self._may_go()).tolist():
            if not self.draft.taken(row):
                self.draft.park(row, Reason.LEAD_CAP)
        self._again_in(self.options.poll_s)

    def _beyond_cap(self) -> Bools:
        options = self.options
        if options.lead_cap_s == options.lead_cap_share == _INFINITY:
            return np.zeros(len(self.view), dtype=bool)
        if not (self.outside & (self.view.phase != Phase.PARKED)).any():
            return np.zeros(len(self.view), dtype=bool)
        answer_s = (self.view.generated + self.remaining) / self.view.rate
        return self.slack > np.minimum(options.lead_cap_s, options.lead_cap_share * answer_s)

    def _quicken(self) -> None:
        """Park who is far ahead, while a reader in the batch is tight and a shorter step would help."""
        view, options = self.view, self.options
        tight = self.running & ~view.paused & ~view.machine & (self.slack < options.tight_s)
        if not tight.any():
            return
        context, half = float(view.context[self.running].sum()), self.batch // 2
        attainable = 1.0 / view.costs.decode_s(max(half, 1), context / 2)
        rates = view.rate[tight & (view.rate <= attainable)]
        if not len(rates):
            return
        self.target_s = 0.9 / float(rates.max())
        if self.step_s <= self.target_s:
            return
        ahead = self.running & (self.slack > options.calm_s) & self._may_go()
        batch = self.batch
        for row in lowest(-self.slack, np.flatnonzero(ahead), half).tolist():
            if view.costs.decode_s(batch, context) <= self.target_s:
                break
            if not self.draft.taken(row):
                self.draft.park(row, self.victims.why(row))
                batch, context = batch - 1, context - float(view.context[row])
        self._again_in(options.poll_s)

    def _may_go(self) -> Bools:
        settled: Bools = self.view.now - self.view.since >= self.options.least_s
        return self.view.may_park & settled

    def _refill(self) -> None:
        """What is left goes to who is outside and started, soonest due first: idle memory serves nobody."""
        view, options = self.view, self.options
        out = self.outside & (self.started | view.machine)
        if not out.any():
            return
        growth = self.batch / max(self.step_s, 1e-6) * options.refill_s
        for row in self._first(out):
            if self.draft.taken(row):
                continue
            if self.capped[row] or (self.step_s > self.target_s and view.phase[row] == Phase.PARKED):
                continue
            if self.draft.free - self.draft.needs(row) < growth and self.batch:
                break
            reason = Reason.NO_READER if view.machine[row] else Reason.RESUMED
            if not self.draft.bring(row, reason, self._way_back(row)):
                break

    def _size_passes(self) -> None:
        """See `passes`; looked at again soon, because slack grows with every token."""
        if self.draft.plan.admit or (self.view.phase == Phase.PREFILLING).any():
            self.draft.plan.prefill_tokens = self.pass_tokens
            self._again_in(max(0.05, 2 * self.step_s))

    def _pass_tokens(self) -> int | None:
        """Prefill no longer than the tightest reader can bear, in the batch or about to come back to it."""
        readers = self.started & ~self.view.machine & ~self.view.paused
        tightest = float(self.slack[readers].min()) if readers.any() else _INFINITY
        fastest = float(self.view.rate_high[readers].max()) if readers.any() else 1.0
        return prefill_budget(
            tightest,
            token_s=1.0 / fastest,
            mixed=self.view.mixed,
            step_s=self.step_s,
            prefill=self.prefill,
            share=self.options.share,
            least_share=self.options.least_share,
        )

    def _write_ahead(self) -> None:
        """Copy what is to leave within `write_s`, so that leaving costs nothing."""
        view, draft = self.view, self.draft
        due = self.outside & (self.slack - self.costs < self.options.margin_s + self.options.write_s)
        due[list(draft.plan.reasons)] = False
        wanted = self.batch / self.step_s * self.options.write_s + draft.needs_of(due) - draft.free
        for row in self.victims.likeliest(_WRITTEN):
            if wanted <= 0:
                return
            if draft.taken(row):
                continue
            wanted -= int(view.owned[row])
            if view.synced[row] < view.owned[row]:
                draft.plan.write.append(row)
                draft.plan.reasons[row] = self.victims.why(row)

    def _place(self, row: int, reason: Reason, *, ahead_s: float, relegate: bool = False) -> bool:
        """Bring the row in, if need be for streams `ahead_s` ahead. True: it has a place, now or soon."""
        draft = self.draft
        if draft.taken(row):
            return False
        if draft.bring(row, reason, self._way_back(row)):
            return True
        if not draft.will_fit(row) and not self.victims.make_room(row, ahead_s=ahead_s, relegate=relegate):
            draft.plan.reasons[row] = Reason.NO_ROOM
            self._again_in(self.options.poll_s)
            return False
        if not draft.bring(row, reason, self._way_back(row)):
            draft.hold(row, Reason.NO_ROOM)
            self._again_in(0.0)
        return True

    def _way_back(self, row: int) -> Place:
        """A prefill, if loads queue for so long that it is faster even with what it costs all others."""
        prefill_s = self.prefill.base_s + self.prefill.per_token_s * float(self.view.context[row])
        return Place.RECOMPUTE if 3.0 * prefill_s < self.costs[row] else Place.LOAD

    def _first(self, mask: Bools) -> list[int]:
        rows: Ints = np.flatnonzero(mask)
        first: list[int] = lowest(self.urgency, rows, self.options.most).tolist()
        return first

    def _again_in(self, seconds: float) -> None:
        least_s = max(_LEAST_S, _LEAST_STEPS * self.step_s)
        self.next_at = min(self.next_at, self.view.now + max(seconds, least_s))
