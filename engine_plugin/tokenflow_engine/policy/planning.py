"""One plan of the policy that ships, step by step.

In order of what is least to be missed: memory for the next steps; one who starves; started streams whose
readers would run dry; newcomers, as far as demand within horizons allows (`horizons`); machines that have
waited long; then, with what is left, whoever is outside. Each takes free room first, and then the place of
streams that are far enough ahead (`victims`).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Ints, Phase, Place, Plan, Reason
from tokenflow_engine.policy.crowd import Crowd
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.horizons import Gate
from tokenflow_engine.policy.options import Options
from tokenflow_engine.policy.passes import Passes
from tokenflow_engine.policy.room import free_memory, wake, why_gone
from tokenflow_engine.policy.rows import heaviest_first, lowest
from tokenflow_engine.policy.slack import Line, expected_remaining, return_costs, slacks, urgencies
from tokenflow_engine.policy.turns import Turns
from tokenflow_engine.policy.victims import Victims

__all__ = ["Planning"]

_INFINITY = float("inf")
_WAITING, _PREFILLING, _PARKED, _OFFLOADED = (
    int(phase) for phase in (Phase.WAITING, Phase.PREFILLING, Phase.PARKED, Phase.OFFLOADED)
)
_LEAST_S, _LEAST_STEPS = 0.02, 2.0
"""Between two plans, unless something happens: what one has ordered takes a step or two to happen."""
_STEPS_AHEAD = 6
"""Memory is kept for so many steps: until one is evicted, and what of it the host lacks is copied."""
_WRITTEN = 16
"""Streams whose KV one plan has written ahead."""


class Planning:
    """What is known of one view, and the plan as it grows; used once."""

    def __init__(self, view: EngineView, options: Options, *, crowd: Crowd | None = None) -> None:
        """`crowd`: whom `view` leaves out."""
        self.view, self.options, self.crowd = view, options, crowd
        self.load = Line.through(view.costs.load_s)
        self.prefill = Line.through(view.costs.prefill_s)
        self.batch = int(np.count_nonzero(view.running))
        self.context = float(view.context[view.running].sum())
        self.step_s = view.costs.decode_s(max(self.batch, 1), self.context)
        self.least_s = max(_LEAST_S, _LEAST_STEPS * self.step_s)
        self.slack = slacks(view, patience_s=options.patience_s)
        self.costs = return_costs(view, load=self.load, prefill=self.prefill)
        self.remaining = expected_remaining(view, tail=options.tail)
        self.passes = Passes(view, options, slack=self.slack, step_s=self.step_s, prefill=self.prefill)
        self.capped = self._beyond_cap()
        self.all_fit = self._nobody_takes_turns()
        self.draft = Draft(view, steps=_STEPS_AHEAD)
        here_s = view.now - view.since
        self.settled = here_s >= options.least_s
        again_s = min(options.again_s, options.again_steps * self.step_s)
        self.recent = (view.preemptions > 0) & (here_s < again_s) & ~view.paused
        self.victims = Victims(
            view, self.draft, self.slack, self.costs, settled=self.settled, recent=self.recent
        )
        self.next_at = _INFINITY
        self.link_s = self.load.base_s
        """Until all loads are done that are ordered so far."""
        self.late_weight = 0.0
        """Of the heaviest class whose loads are late because the link is busy with others."""
        self.overload = False
        self.target_s = _INFINITY
        """Longest step that the tightest reader in the batch can bear."""

    def plan(self) -> Plan:
        """The steps, most urgent first."""
        if self._nobody_gains():
            return Plan(stock=True, next_at=self.view.now + self.options.poll_s)
        if self.draft.soon < 0:
            free_memory(self.draft, self.victims.in_turn)
        passing = self._passing_newcomers()
        self._serve_starving()
        self._return_due()
        self._admit(passing)
        self._serve_machines()
        self._cap_leads()
        self._quicken()
        self._refill()
        self._size_passes()
        self._write_ahead()
        why = Reason.OVERLOAD if self.overload else Reason.NO_ROOM
        self._again_in(self.draft.full_at() - self.view.now)
        return self._woken().finish(next_at=self.next_at, why_waiting=why)

    def _serve_starving(self) -> None:
        """Who has starved longest takes a place whatever others have left, or its room is kept for it.

        Readers who are dry, and machines; for newcomers what is free is kept (`_keep_free_for`).
        """
        view, options = self.view, self.options
        may_come = view.outside & (view.started | view.machine)
        if not may_come.any():
            return
        late_s = view.now - view.since - options.starving_s
        late_s[view.machine] -= options.patience_s
        may_come &= (self.slack <= 0) & (late_s >= 0) & ~self.draft.beyond_all()
        turns = Turns(after_s=options.starving_s, stay_s=options.stay_s)
        for row in lowest(-late_s, np.flatnonzero(may_come), 1).tolist():
            turns.give(self.draft, row, self.victims.rank, self._way_back(row))
            self._again_in(0.0)

    def _return_due(self) -> None:
        """Started streams whose readers would run dry before a later plan could bring them back."""
        view, options = self.view, self.options
        out = view.outside & view.started & ~view.machine
        if not out.any():
            return
        due_in = self._due_in(out)
        later = due_in[out & (due_in > 0)]
        if len(later):
            self._again_in(float(later.min()))
        away_s = view.costs.evict_s(0.0)
        for row in self._first(out & (due_in <= 0)):
            if due_in.item(row) < -options.late_s and self._waits_for_link(row):
                self.late_weight = max(self.late_weight, view.weight.item(row))
            slack = self.slack.item(row)
            ahead_s = max(slack, 0.0) + away_s + options.ahead_s
            if self._place(row, Reason.URGENT, ahead_s=ahead_s, relegate=slack <= 0):
                continue
            if slack <= 0 and self._keep_free_for(row, view.now - view.since.item(row)):
                break

    def _due_in(self, out: Bools) -> Floats:
        """Seconds in which each stream has to be on its way back, if it is `out` there.

        Loads come one after the other: before many that are needed at one time the first have to start early,
        or the last would be late. Else leads grow alike, the link idles, and then all are due at once.
        """
        view, options = self.view, self.options
        spare_s = self.slack - self.step_s - options.margin_s
        due_in: Floats = spare_s - self.costs
        rows = np.flatnonzero(out & (view.phase == _OFFLOADED))
        rows = rows[self.slack.take(rows).argsort(kind="stable")]
        queued_s = self.load.base_s + view.context.take(rows).cumsum() * self._load_s
        due_in[rows] = np.minimum.accumulate((spare_s.take(rows) - queued_s)[::-1])[::-1]
        return due_in

    @property
    def _load_s(self) -> float:
        """A token's load, with the share of the link that loads can count on."""
        return self.load.per_token_s / self.options.loading_share

    def _passing_newcomers(self) -> list[int]:
        """Those that the gate lets in, heavier classes first, then the most urgent."""
        view, options = self.view, self.options
        new = view.outside & ~view.started & ~view.machine
        if not new.any():
            return []
        self._again_in(options.poll_s)
        order = heaviest_first(self.slack, view.weight, np.flatnonzero(new), options.most)
        inside = (view.started | ~view.outside) & ~view.machine
        if self.all_fit or not inside.any():
            everybody: list[int] = order.tolist()
            return everybody
        gate = Gate(
            efficiency=options.efficiency,
            keep_s=max(options.keep_s, self._load_s * view.kv_tokens),
            paused_share=options.paused_share,
            yields_s=options.yields_s,
        )
        passing = gate.passing(view, inside, order, remaining=self.remaining, prefill=self.prefill)
        self.overload = len(passing) < len(order)
        return passing

    def _admit(self, passing: list[int]) -> None:
        """Newcomers as far as they can be prefilled soon, and of no class whose loads are late.

        Who makes way for them would have to be loaded in turn. A newcomer who is `starving_s` late waits for
        no loads.
        """
        view, passes, options = self.view, self.passes, self.options
        in_time = (view.weight > self.late_weight) | (self.slack < -options.starving_s)
        newcomers = [row for row in passing if in_time[row] and not self.draft.taken(row)]
        if not newcomers:
            return
        late_s = -float(self.slack.take(newcomers).min())
        wait_s, least = passes.beginning(newcomers, late_s=late_s)
        if wait_s > 0:
            self._again_in(0.0)
            return
        room, is_first = passes.room(least, late_s=late_s, all_fit=self.all_fit), True
        for row in newcomers:
            tokens = view.prefill.item(row)
            if room <= 0 or (passes.would_cut(tokens, room) and not is_first):
                break
            slack = self.slack.item(row)
            if self._place(row, Reason.ADMITTED, ahead_s=options.ahead_new_s, relegate=slack < 0):
                room, is_first = room - tokens, False
            elif self._keep_free_for(row, -slack):
                break

    def _nobody_gains(self) -> bool:
        """Newcomers wait, all fit, and no reader gets a lead: the engine's own order is the fastest."""
        if not self.all_fit:
            return False
        view, waiting = self.view, self.view.phase == _WAITING
        if not waiting.any() or bool((view.outside & ~waiting).any()):
            return False
        count = len(view)
        context = float((view.context + self.remaining / 2).sum())
        attainable = 1.0 / view.costs.decode_s(count, context)
        gains = view.read & (view.rate < self.options.no_lead_share * attainable)
        return not gains.any()

    def _nobody_takes_turns(self) -> bool:
        """All there are fit to their ends, and none is of more weight: keeping some out would help nobody.

        What they want beyond the engine's speed, each lacks a little of. Of several classes the lightest is
        kept out instead.
        """
        view = self.view
        if (
            self.crowd is not None
            or len(view) > view.max_running
            or bool((view.weight != view.weight[0]).any())
        ):
            return False
        whole = float((view.context + self.remaining).sum()) + len(view) * view.page_tokens
        return whole <= self.options.ample_whole * view.kv_tokens

    def _serve_machines(self) -> None:
        """Machines that have been patient take a place as a reader would: from streams that are ahead."""
        view, options = self.view, self.options
        out = view.outside & view.machine
        if not out.any():
            return
        for row in self._first(out & (self.slack <= 0)):
            self._place(row, Reason.URGENT, ahead_s=options.ahead_new_s)
        self._again_in(options.poll_s)

    def _cap_leads(self) -> None:
        """While somebody waits, streams beyond the cap make way for the rest of the batch."""
        if not self.capped.any():
            return
        for row in np.flatnonzero(self.capped & self.view.running & self._may_go()).tolist():
            if not self.draft.taken(row):
                self.draft.park(row, Reason.LEAD_CAP)
        self._again_in(self.options.poll_s)

    def _beyond_cap(self) -> Bools:
        options = self.options
        least_s = min(float(self.view.lead_cap.min(initial=_INFINITY)), options.lead_cap_s)
        if least_s == options.lead_cap_share == _INFINITY:
            return np.zeros(len(self.view), dtype=bool)
        if not (self.view.outside & (self.view.phase != _PARKED)).any():
            return np.zeros(len(self.view), dtype=bool)
        caps = np.minimum(self.view.lead_cap, options.lead_cap_s)
        answer_s = (self.view.generated + self.remaining) / self.view.rate
        return self.slack > np.minimum(caps, options.lead_cap_share * answer_s)

    def _quicken(self) -> None:
        """Park who is far ahead, while a reader in the batch is tight and a shorter step would help.

        As long as the smaller batch makes what all are to read: else they run dry one after the other. While
        newcomers are refused, all that it makes is wanted, and one must be further ahead to go.
        """
        view, options = self.view, self.options
        tight = view.running & view.read & (self.slack < options.tight_s)
        if not tight.any():
            return
        half = self.batch // 2
        attainable = 1.0 / view.costs.decode_s(max(half, 1), self.context / 2)
        rates = view.rate[tight & (view.rate <= attainable)]
        if not len(rates):
            return
        self.target_s = max(0.9 / float(rates.max()), self._least_step_s())
        if self.step_s <= self.target_s:
            return
        calm_s = options.calm_refusing_s if self.overload else options.calm_s
        ahead = view.running & (self.slack > calm_s) & self._may_go()
        for row in lowest(-self.slack, np.flatnonzero(ahead), half).tolist():
            if self._next_step_s() <= self.target_s:
                break
            if not self.draft.taken(row):
                self.draft.park(row, why_gone(view, row))
        self._again_in(options.poll_s)

    def _next_step_s(self, more: int = 0) -> float:
        """The next step, of the batch as the draft has it and so many `more` of the mean context."""
        batch = self.view.max_running - self.draft.places + more
        return self.view.costs.decode_s(batch, batch * self.context / self.batch)

    def _least_step_s(self) -> float:
        """A step of the smallest batch that makes what all are to read; infinity if this one does not."""
        base_s, demand = self.view.costs.decode_s(0, 0.0), self._demand()
        a_stream_s = (self.step_s - base_s) / self.batch
        spare = self.options.efficiency - demand * a_stream_s
        least = demand * base_s / spare if spare > 0 else _INFINITY
        return base_s + least * a_stream_s if least <= self.batch else _INFINITY

    def _demand(self) -> float:
        """Tokens a second that started streams must get, if no reader is to run dry within `catch_up_s`."""
        view, seconds = self.view, self.options.catch_up_s
        rows = np.flatnonzero(view.started & view.read)
        read = seconds * view.rate.take(rows) - view.buffered.take(rows)
        return float(np.minimum(np.maximum(read, 0.0), self.remaining.take(rows)).sum()) / seconds

    def _may_go(self) -> Bools:
        rows: Bools = self.view.may_park & self.settled & ~self.recent
        return rows

    def _refill(self) -> None:
        """What is left goes to who is outside and started: idle memory serves nobody.

        Of those that are not due yet, who is expected to run longest comes first, so that few are left at the
        end to run in small batches (LEPT: R. Weber, Scheduling jobs with stochastic processing requirements
        on parallel machines to minimize makespan or flowtime, 1982). Readers who have paused come last.
        """
        view, options = self.view, self.options
        out = view.outside & (view.started | view.machine)
        if not out.any():
            return
        growth = self.batch / max(self.step_s, 1e-6) * options.refill_s
        is_short = False
        keys = np.where(view.paused, _INFINITY, -self.remaining)
        for row in lowest(keys, np.flatnonzero(out), options.most).tolist():
            if self.draft.taken(row):
                continue
            if self.capped[row] or (self.target_s < _INFINITY and self._next_step_s(1) > self.target_s):
                continue
            if is_short and view.phase.item(row) != _PARKED:
                continue
            if self.draft.free - self.draft.needs(row) < growth and self.batch:
                is_short = True
                continue
            reason = Reason.NO_READER if view.machine[row] else Reason.RESUMED
            if not self._waits_for_link(row):
                is_short = not self._bring(row, reason) or is_short

    def _woken(self) -> Draft:
        """The draft, or another if nothing would ever happen after it."""
        if not self.view.outside.all():
            return self.draft
        at_once = self.view.parked
        order = [lowest(self.urgency, np.flatnonzero(rows), len(self.view)) for rows in (at_once, ~at_once)]
        return wake(self.draft, np.concatenate(order))

    def _size_passes(self) -> None:
        """See `passes`; looked at again soon, because slack grows with every token."""
        if self.draft.plan.admit or (self.view.phase == _PREFILLING).any():
            self.draft.plan.prefill_tokens = self.passes.tokens
            self._again_in(max(0.05, 2 * self.step_s))

    def _write_ahead(self) -> None:
        """Copy what is to leave within `write_s`, so that leaving costs nothing."""
        view, draft = self.view, self.draft
        likeliest = [row for row in self.victims.likeliest(_WRITTEN) if not draft.taken(row)]
        if not likeliest:
            return
        within_s = self.options.margin_s + self.options.write_s
        due = view.outside & (self.slack - self.costs < within_s)
        due[list(draft.plan.reasons)] = False
        wanted = self.batch / self.step_s * self.options.write_s + draft.needs_of(due) - draft.free
        owned = view.owned.take(likeliest)
        enough = float(owned.sum()) - wanted + 1
        if self.crowd is not None and enough > 0:
            wanted += self.crowd.due_tokens(
                prefill=self.prefill, within_s=within_s, steps=_STEPS_AHEAD, enough=enough
            )
        for row, tokens in zip(likeliest, owned.tolist(), strict=True):
            if wanted <= 0:
                return
            wanted -= tokens
            if view.synced.item(row) < tokens:
                draft.plan.write.append(row)
                draft.plan.reasons[row] = why_gone(view, row)

    def _place(self, row: int, reason: Reason, *, ahead_s: float, relegate: bool = False) -> bool:
        """Bring the row in, if need be for streams `ahead_s` ahead. True: it has a place, now or soon."""
        draft = self.draft
        if draft.taken(row) or self._waits_for_link(row):
            return False
        if not draft.will_fit(row) and not self.victims.make_room(row, ahead_s=ahead_s, relegate=relegate):
            draft.plan.reasons[row] = Reason.NO_ROOM
            self._again_in(self.options.poll_s)
            return False
        if self._bring(row, reason):
            return True
        draft.hold(row, Reason.NO_ROOM)
        self._again_in(0.0)
        return True

    def _bring(self, row: int, reason: Reason) -> bool:
        place = self._way_back(row)
        is_in = self.draft.bring(row, reason, place)
        if is_in and self._is_load(row, place):
            self.link_s += self.load.per_token_s * self.view.context.item(row)
        return is_in

    def _waits_for_link(self, row: int) -> bool:
        """Whether its load would only queue until there is another plan.

        It would take memory all that time, in which others can decode.
        """
        if self.link_s <= self.least_s or not self._is_load(row, self._way_back(row)):
            return False
        self._again_in(0.0)
        return True

    def _is_load(self, row: int, place: Place) -> bool:
        is_known = self.load != self.prefill  # else orders do without host memory, and its link is not seen
        return is_known and place is Place.LOAD and self.view.phase.item(row) == _OFFLOADED

    def _keep_free_for(self, row: int, late_s: float) -> bool:
        """Keep what is free for who was refused and is `hold_s` late: small ones would take it for ever."""
        if late_s < self.options.hold_s or self.draft.beyond_all()[row]:
            return False
        self.draft.hold(row, Reason.NO_ROOM)
        return True

    def _way_back(self, row: int) -> Place:
        """A prefill, if loads queue for longer than it would hold up all streams in the batch together.

        Where prefills are fast and loads many, a shorter queue would have all of them computed again.
        """
        if self.view.phase.item(row) != _OFFLOADED:
            return Place.LOAD
        prefill_s = self.prefill.base_s + self.prefill.per_token_s * self.view.context.item(row)
        return Place.RECOMPUTE if max(self.batch, 1) * prefill_s < self.costs.item(row) else Place.LOAD

    @cached_property
    def urgency(self) -> Floats:
        """See `urgencies`."""
        return urgencies(self.slack, self.view.weight)

    def _first(self, mask: Bools) -> list[int]:
        rows: Ints = np.flatnonzero(mask)
        first: list[int] = lowest(self.urgency, rows, self.options.most).tolist()
        return first

    def _again_in(self, seconds: float) -> None:
        self.next_at = min(self.next_at, self.view.now + max(seconds, self.least_s))
