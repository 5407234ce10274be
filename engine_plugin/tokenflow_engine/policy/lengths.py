"""How long answers get, from those that have ended and those that run."""

from __future__ import annotations

import numpy as np

from tokenflow_engine.policy.base import Ints

__all__ = ["EndedOutputs", "expected_output"]

_AT_LEAST = 1.25
"""A stream that runs is expected to get at least so many times as long as it is."""
_REMEMBERED = 500.0
"""Answers: the weight of one falls to 1/e by the time so many more have ended."""


class EndedOutputs:
    """Tokens of the answers that have ended, and how many these are; both follow the traffic.

    An answer that was aborted has ended like any other: what is asked is how long a stream will go on in this
    engine, and a reader who leaves gives its memory back. (To take it for one of unknown length, as in the
    estimate of a life time under censoring, would answer how long it had become; that has no bound where
    everybody leaves early.) What ended before its first token says nothing.
    """

    def __init__(self) -> None:
        self.tokens = 0.0
        self.count = 0.0

    def add(self, tokens: int) -> None:
        """One has ended, after so many tokens."""
        if tokens <= 0:
            return
        kept = 1.0 - 1.0 / _REMEMBERED
        self.tokens = kept * self.tokens + tokens
        self.count = kept * self.count + 1.0


def expected_output(
    live: Ints, *, ended_tokens: float, ended: float, prior_tokens: float, prior_weight: float = 8.0
) -> float:
    """The mean output of a stream, in tokens.

    `live`: tokens that each running stream has generated. The mean over ended streams alone is too short
    while long ones still run, and too many newcomers are let in; all tokens over all ends is far too long
    when a burst has begun, and nobody is. So each live stream counts as the mean of the ended ones, or as
    what it is bound to get if that is more. `prior_tokens` counts as `prior_weight` ended streams.
    """
    known = (prior_weight * prior_tokens + ended_tokens) / (prior_weight + ended)
    likely = float(np.maximum(_AT_LEAST * live, known).sum())
    count = prior_weight + ended + len(live)
    return (prior_weight * prior_tokens + ended_tokens + likely) / count
