"""First come, first served: the stock engine, untouched."""

from __future__ import annotations

from collections.abc import Sequence

from tokenflow_engine.policy.base import EngineView, Place, Plan, Reason
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.rows import preempted

__all__ = ["FCFS"]


class FCFS:
    """Leaves everything to the engine.

    Streams that another policy had preempted come back first, in order of arrival.
    """

    name = "fcfs"

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        """Stock, once nothing is preempted any more (a policy can be changed as the engine runs)."""
        away = preempted(view).nonzero()[0].tolist()
        if not away:
            return Plan(stock=True)
        draft = Draft(view)
        for row in away:
            if not draft.bring(row, Reason.STOCK, Place.LOAD):
                break
        return draft.finish(next_at=view.now + 0.1)
