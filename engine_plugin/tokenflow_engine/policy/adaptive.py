"""What ships: one currency (slack), decisions on events, and no promise that the engine cannot keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from tokenflow_engine.policy.base import EngineView, Phase, Plan
from tokenflow_engine.policy.options import Options
from tokenflow_engine.policy.planning import Planning
from tokenflow_engine.policy.rows import in_batch, outside, running

__all__ = ["Adaptive"]


class Adaptive:
    """Stateless: hysteresis comes from the view's `since`, so equal views give equal plans.

    Nobody starves. A started stream whose reader is dry is brought back at once where a stream far enough
    ahead or free room is found, and after `starving_s` outside it takes a place from any stream that has had
    its `least_s`, so it waits at most `starving_s + least_s * (number of starving ones before it)` beyond the
    time the engine needs to bring it back. A newcomer waits until the demand of those before it in its own
    and heavier classes has gone down; with no reader's stream inside it always gets in.
    """

    name = "adaptive"

    def __init__(self, **options: float) -> None:
        unknown = options.keys() - {option.name for option in fields(Options)}
        if unknown:
            raise ValueError(f"unknown options of policy adaptive: {', '.join(sorted(unknown))}")
        self._options = Options(**options)  # type: ignore[arg-type]

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        """See `Policy.plan`."""
        return _stock_plan(view, self._options) or Planning(view, self._options).plan()


def _stock_plan(view: EngineView, options: Options) -> Plan | None:
    """The engine's own behaviour, where that is best: nobody outside and memory ample, or no readers."""
    out = outside(view)
    if not out.any():
        if view.kv_free < options.ample * view.kv_tokens:
            return None
        batch = int(in_batch(view).sum())
        if not batch:
            return Plan(stock=True)
        if options.tight_s > 0 and _speed_matters(view, options):
            return None
        step_s = view.costs.decode_s(batch, float(view.context[in_batch(view)].sum()))
        spare = view.kv_free - options.ample * view.kv_tokens
        return Plan(stock=True, next_at=view.now + max(spare / batch * step_s, options.poll_s))
    if view.machine.all() and not (out & (view.phase != Phase.WAITING)).any():
        return Plan(stock=True)
    return None


def _speed_matters(view: EngineView, options: Options) -> bool:
    """Some reader is tight and others in the batch are not: shorter steps would help it."""
    rows = running(view) & ~view.paused
    slack = (view.buffered / np.maximum(view.rate_high, 1e-6))[rows & ~view.machine]
    if not len(slack) or slack.min() >= options.tight_s:
        return False
    step_s = view.costs.decode_s(int(rows.sum()), float(view.context[rows].sum()))
    return bool(step_s * view.rate[rows & ~view.machine].max() > 0.9)
