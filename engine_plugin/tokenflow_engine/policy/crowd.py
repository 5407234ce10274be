"""A view without its crowd: of those who wait for a first token, only whom one plan could let in.

Thousands may wait, and a plan considers a few dozen of them, the most urgent of the heaviest class. What it
says of those is the same with and without the others, and weighing them all would be most of its time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Ints, Phase
from tokenflow_engine.policy.rows import heaviest_first, lowest
from tokenflow_engine.policy.slack import Line, urgencies

__all__ = ["Crowd"]

_WAITING = int(Phase.WAITING)
_LEAST = 64
"""Fewer are no crowd."""
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Crowd:
    """Rows that a plan considers, and rows that it leaves out."""

    whole: EngineView
    kept: Ints
    """In order."""
    waiting: Ints
    """All who wait for a first token."""
    slack: Floats
    """Theirs."""
    stays: Bools
    """Which of them are kept."""

    @classmethod
    def of(cls, view: EngineView, *, most: int, patience_s: float) -> Crowd | None:
        """Keep, of those who wait for a first token, `most` readers, `heaviest_first`, and `most` machines.

        None if there is no crowd, or if all there are could run at one time. Slack is that of `slacks`.
        """
        if len(view) <= max(view.max_running, _LEAST):
            return None
        is_waiting = (view.phase == _WAITING) & (view.generated == 0)
        waiting = np.flatnonzero(is_waiting)
        if len(waiting) <= max(2 * most, _LEAST):
            return None
        slack = view.ttft_target.take(waiting) - (view.now - view.arrived.take(waiting))
        machine = view.machine.take(waiting)
        readers, machines = np.flatnonzero(~machine), np.flatnonzero(machine)
        if len(machines):
            slack[machines] = patience_s - (view.now - view.since.take(waiting[machines]))
        weight = view.weight.take(waiting)
        stays = np.zeros(len(waiting), dtype=bool)
        # In a class the order by slack is that by urgency.
        stays[heaviest_first(slack, weight, readers, most)] = True
        if len(machines):
            stays[lowest(urgencies(slack, weight), machines, most)] = True
        is_kept = ~is_waiting
        is_kept[waiting[stays]] = True
        return cls(view, np.flatnonzero(is_kept), waiting, slack, stays)

    def rest(self) -> EngineView:
        """What the plan is made for."""
        return self.whole.part(self.kept)

    def due_tokens(self, *, prefill: Line, within_s: float, steps: int, enough: float) -> int:
        """KV that those left out would take who are due `within_s`, with room for so many steps.

        In order of arrival, until there are `enough`.
        """
        view, page, tokens = self.whole, self.whole.page_tokens, 0
        for first in range(0, len(self.waiting), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            rows = self.waiting[some]
            costs = prefill.of(view.prefill.take(rows))
            context = view.context.take(rows[(self.slack[some] - costs < within_s) & ~self.stays[some]])
            tokens += int((-(-(context + steps) // page)).sum()) * page
            if tokens >= enough:
                break
        return tokens
