"""Where the engine's own order is best: nobody is outside and memory is ample, or nobody reads."""

from __future__ import annotations

import numpy as np

from tokenflow_engine.policy.base import EngineView, Plan
from tokenflow_engine.policy.options import Options
from tokenflow_engine.policy.slack import Line, expected_remaining

__all__ = ["stock_plan"]


def stock_plan(view: EngineView, options: Options) -> Plan | None:
    """The plan that leaves all to the engine, if there is nothing to decide."""
    if len(view) <= view.max_running and not view.outside.any():  # more are not all inside
        return _of_nobody_outside(view, options)
    if view.machine.all() and not view.preempted.any():
        return Plan(stock=True)
    return None


def _of_nobody_outside(view: EngineView, options: Options) -> Plan | None:
    spare = view.kv_free - options.ample * view.kv_tokens
    if spare < 0:
        return None
    inside = view.in_batch
    batch, room = int(np.count_nonzero(inside)), _room(view, options)
    if not batch:
        return Plan(stock=True, next_prompt=room)
    if options.tight_s > 0 and _speed_matters(view, options):
        return None
    step_s = view.costs.decode_s(batch, float(view.context[inside].sum()))
    unnoticed = _unnoticed(view, options, step_s=step_s)
    ample_s = spare / batch * step_s if unnoticed >= room else 0.0
    return Plan(stock=True, next_prompt=min(room, unnoticed), next_at=view.now + max(ample_s, options.poll_s))


def _speed_matters(view: EngineView, options: Options) -> bool:
    """Some reader is tight and others in the batch are not: shorter steps would help it."""
    rows = view.running & ~view.paused
    slack = (view.buffered / np.maximum(view.rate_high, 1e-6))[rows & ~view.machine]
    if not len(slack) or slack.min() >= options.tight_s:
        return False
    step_s = view.costs.decode_s(int(rows.sum()), float(view.context[rows].sum()))
    return bool(step_s * view.rate[rows & ~view.machine].max() > 0.9)


def _room(view: EngineView, options: Options) -> int:
    """Tokens of the longest prompt with which all would still fit to their ends, and have a place."""
    if len(view) >= min(view.max_running, view.max_resident):
        return 0
    ends = view.context + expected_remaining(view, tail=options.tail)
    taken = float(ends.sum()) + view.mean_output + (len(view) + 1) * view.page_tokens
    room = min(options.ample_whole * view.kv_tokens - taken, view.kv_free - view.page_tokens)
    return max(int(room), 0)


def _unnoticed(view: EngineView, options: Options, *, step_s: float) -> int:
    """Tokens of the longest prompt for whose prefill all readers have text; all read slower than is written.

    What they have grows from now on, so that it still holds when somebody comes.
    """
    reads = view.read
    if not reads.any():
        return view.kv_tokens
    rate = np.maximum(view.rate_high[reads], 1e-6)
    if step_s * float(rate.max()) >= 1.0:
        return 0
    slack_s = float((view.buffered[reads] / rate).min())
    return int(Line.through(view.costs.prefill_s).within(options.share * slack_s - step_s))
