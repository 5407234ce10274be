"""Preempts at random, to test that nobody can tell. Never chosen unless asked for by name."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Sequence

from tokenflow_engine.policy.base import EngineView, Phase, Place, Plan, Reason
from tokenflow_engine.policy.due import due_back

__all__ = ["Chaos"]

_logger = logging.getLogger(__name__)

_EVERY_S = 0.01
_HOLD_AFTER = 5
_MOST = 5
"""Preemptions of one stream, so that everybody gets done."""
_AT_THE_LATEST = 8
"""So many tokens before its end, whoever was not preempted yet is."""


class Chaos:
    """``TOKENFLOW_CHAOS`` is its seed, and may name the moves it makes: ``7:park,evict,load,recompute``.

    With the move ``hold``, streams whose id begins with ``soft`` are parked, those with ``hard`` evicted, and
    both stay out until another policy is in force; with ``stay``, those too whose KV was given up. Else every
    stream is preempted once or more often, and the log tells of each time.
    """

    name = "chaos"

    def __init__(self) -> None:
        seed, _, moves = os.environ.get("TOKENFLOW_CHAOS", "0").partition(":")
        self._random = random.Random(int(seed))  # noqa: S311 - a test's dice
        self._moves = set(moves.split(",")) if moves else {"park", "evict", "load", "recompute"}
        self._preempted: dict[str, int] = {}

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        """A random plan that this view allows. Everybody who waits is admitted."""
        plan = Plan(next_at=view.now + _EVERY_S)
        for row, rid in enumerate(ids):
            phase = Phase(int(view.phase[row]))
            if "hold" in self._moves:
                if not ("stay" in self._moves and phase is Phase.WAITING and view.generated[row]):
                    _hold(row, rid, phase, view, plan)
            else:
                self._decide(row, phase, view, plan)
        self._random.shuffle(plan.write)
        plan.due_s = due_back(view, plan.evict)
        self._tell(dict(zip(ids, view.preemptions.tolist(), strict=True)))
        return plan

    def _tell(self, preempted: dict[str, int]) -> None:
        for rid, times in preempted.items():
            if times > self._preempted.get(rid, 0):
                _logger.info("TokenFlow: chaos has preempted %s %d times", rid, times)
        self._preempted = preempted

    def _decide(self, row: int, phase: Phase, view: EngineView, plan: Plan) -> None:
        dice = self._random.random()
        if not view.preemptions[row] and view.max_output[row] - view.generated[row] <= _AT_THE_LATEST:
            dice /= 10  # below the chances of both moves together
        spent = view.preemptions[row] >= _MOST
        if phase is Phase.WAITING:
            plan.admit.append(row)
        elif phase is Phase.RUNNING and view.may_park[row] and not spent and view.generated[row] > 0:
            if dice < 0.05 and "park" in self._moves:
                plan.park.append(row)
                plan.reasons[row] = Reason.AHEAD
            elif dice < 0.10 and "evict" in self._moves:
                plan.evict.append(row)
                plan.reasons[row] = Reason.AHEAD
            elif dice < 0.5:
                plan.write.append(row)
        elif phase is Phase.PARKED:
            if dice < 0.2 or "evict" not in self._moves:
                plan.resume.append(row)
            elif dice < 0.25:
                plan.evict.append(row)
            elif dice < 0.5:
                plan.write.append(row)
        elif phase is Phase.OFFLOADED and dice < 0.3:
            by_load = "load" in self._moves and (dice < 0.25 or "recompute" not in self._moves)
            plan.load.append((row, Place.LOAD if by_load else Place.RECOMPUTE))


def _hold(row: int, rid: str, phase: Phase, view: EngineView, plan: Plan) -> None:
    if phase is Phase.WAITING:
        plan.admit.append(row)
    elif phase is Phase.RUNNING and view.may_park[row] and view.generated[row] >= _HOLD_AFTER:
        if rid.startswith("soft"):
            plan.park.append(row)
        elif rid.startswith("hard"):
            plan.evict.append(row)
        plan.reasons[row] = Reason.AHEAD
