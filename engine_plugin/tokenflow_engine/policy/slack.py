"""Slack, the one currency: seconds until the reader of a stream would notice that it gets nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tokenflow_engine.policy.base import EngineView, Floats, Ints, Phase

__all__ = ["Line", "expected_remaining", "return_costs", "slacks", "urgencies"]

_LONG_S = 1e9
_WAITING = int(Phase.WAITING)


@dataclass(frozen=True, slots=True)
class Line:
    """A cost as a straight line, for whole columns at once: seconds for tokens."""

    base_s: float
    per_token_s: float

    @classmethod
    def through(cls, cost_s: Callable[[float], float], *, tokens: float = 1024.0) -> Line:
        """The line through the cost of nothing much and of `tokens`."""
        low, high = cost_s(1.0), cost_s(tokens)
        slope = max(high - low, 0.0) / (tokens - 1.0)
        return cls(low - slope, slope)

    def of(self, tokens: Ints) -> Floats:
        """Seconds for each of `tokens`."""
        seconds: Floats = (tokens * self.per_token_s).astype(np.float64, copy=False)
        seconds += self.base_s
        return seconds

    def within(self, seconds: float) -> float:
        """Tokens that `seconds` pay for."""
        return max(seconds - self.base_s, 0.0) / max(self.per_token_s, 1e-12)


def slacks(view: EngineView, *, patience_s: float) -> Floats:
    """Seconds until each stream's reader would notice; negative: for how long a first token has been late.

    Started: unread tokens at the upper band of the reader's rate; paused readers do not notice (infinity).
    Not started: what is left of the class's TTFT target. Nobody reads a machine's stream: outside the batch
    it is due after `patience_s`, inside it never is.
    """
    has_started = view.started
    slack = np.where(
        has_started,
        view.buffered / np.maximum(view.rate_high, 1e-6),
        view.ttft_target - (view.now - view.arrived),
    )
    np.copyto(slack, np.inf, where=view.paused & has_started)
    machine = view.machine
    if machine.any():
        out = view.outside
        slack[machine & ~out] = np.inf
        slack[machine & out] = (patience_s - (view.now - view.since))[machine & out]
    return slack


def urgencies(slack: Floats, weight: Floats) -> Floats:
    """Slack as the class sees it: a heavier one runs dry sooner and is late by more. Lower is more urgent."""
    capped = np.minimum(np.maximum(slack, -_LONG_S), _LONG_S)
    return np.where(capped > 0, capped / weight, capped * weight)


def return_costs(view: EngineView, *, load: Line, prefill: Line) -> Floats:
    """Seconds to bring each stream back into the batch, were it outside: a load, or a prefill."""
    cost = load.of(view.context)
    waiting = np.flatnonzero(view.phase == _WAITING)
    cost[waiting] = prefill.of(view.prefill.take(waiting))
    np.copyto(cost, 0.0, where=view.parked)
    return cost


def expected_remaining(view: EngineView, *, tail: float) -> Floats:
    """Tokens that each stream is expected to generate yet.

    From the mean output at first. The longer a stream has run, the longer it is likely to run on (long-tailed
    lengths): never less than `tail` times what it has generated, never more than the request allows.
    """
    generated = view.generated.astype(np.float64)
    likely = np.maximum(max(view.mean_output, 1.0) - generated, np.maximum(tail * generated, 1.0))
    return np.minimum(likely, np.maximum(view.max_output - generated, 1.0))
