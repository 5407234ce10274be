"""First come, first served: the stock engine, untouched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenflow_engine.policy.base import EngineView, Plan, Reason
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.room import wake

__all__ = ["FCFS"]


class FCFS:
    """Leaves everything to the engine.

    Streams that another policy had preempted come back first: parked ones, whose memory is of use to nobody
    until they have finished, then the others, each in order of arrival.
    """

    name = "fcfs"

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        """Stock, once nothing is preempted any more (a policy can be changed as the engine runs)."""
        away = view.preempted
        if not away.any():
            return Plan(stock=True)
        draft = Draft(view)
        here = view.parked
        order = np.concatenate([np.flatnonzero(here), np.flatnonzero(away & ~here)])
        for row in order.tolist():
            if not draft.bring(row, Reason.STOCK):
                break
        return wake(draft, order).finish(next_at=view.now + 0.1)
