"""How long answers get, from those that have ended and those that run."""

from __future__ import annotations

import numpy as np

from tokenflow_engine.policy.base import Ints

__all__ = ["expected_output"]

_AT_LEAST = 1.25
"""A stream that runs is expected to get at least so many times as long as it is."""


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
