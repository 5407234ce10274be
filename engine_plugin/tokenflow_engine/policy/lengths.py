"""How long answers get, from those that have ended and those that run."""

from __future__ import annotations

import numpy as np

from tokenflow_engine.policy.base import Floats, Ints

__all__ = ["EndedOutputs", "expected_output"]

_AT_LEAST = 1.25
"""A stream is expected to get at least so many times as long as it is, however short those that ended."""
_REMEMBERED = 500.0
"""Answers: the weight of one falls to 1/e by the time so many more have ended."""
_PER_OCTAVE = 4
_CLASSES = 20 * _PER_OCTAVE


class EndedOutputs:
    """How many answers of each length have ended, and their tokens; both follow the traffic.

    An answer that was aborted has ended like any other: what is asked is how long a stream will go on in this
    engine, and a reader who leaves gives its memory back. What ended before its first token says nothing.
    """

    def __init__(self) -> None:
        self.count: Floats = np.zeros(_CLASSES)
        """By length, four classes to the octave."""
        self.tokens: Floats = np.zeros(_CLASSES)

    def add(self, tokens: int) -> None:
        """One has ended, after so many tokens."""
        if tokens <= 0:
            return
        self.count *= 1.0 - 1.0 / _REMEMBERED
        self.tokens *= 1.0 - 1.0 / _REMEMBERED
        at = _class_of(np.array([tokens]))
        self.count[at] += 1.0
        self.tokens[at] += tokens


def expected_output(
    live: Ints, ended: EndedOutputs, *, prior_tokens: float, prior_weight: float = 8.0
) -> float:
    """The mean output of a stream, in tokens.

    `live`: tokens that each running stream has generated. In a burst the short answers end first: the mean
    over ended streams is far too short while long ones still run, and too many newcomers are let in. All
    tokens over all ends is far too long when a burst has begun, and nobody has ended. So a live stream counts
    as the mean of those that got longer than it is now, from the longest down (B. Efron, The two sample
    problem with censored data, 1967: the weight of what is censored goes to those behind it). `prior_tokens`
    counts as `prior_weight` ended streams.
    """
    count, tokens = ended.count.copy(), ended.tokens.copy()
    at = _class_of(np.array([prior_tokens]))
    count[at] += prior_weight
    tokens[at] += prior_weight * prior_tokens
    begun = live[live > 0]
    classes = _class_of(begun)
    here = np.bincount(classes, minlength=_CLASSES)
    here[0] += len(live) - len(begun)
    grown = _AT_LEAST * np.bincount(classes, weights=begun, minlength=_CLASSES)
    longer, longer_tokens = 0.0, 0.0
    some = np.flatnonzero(here + count)[::-1]
    columns = (column.take(some).tolist() for column in (here, grown, count, tokens))
    for alive, alive_tokens, gone, gone_tokens in zip(*columns, strict=True):
        expected = max(alive_tokens, alive * longer_tokens / longer if longer else 0.0)
        longer += alive + gone
        longer_tokens += expected + gone_tokens
    return longer_tokens / longer


def _class_of(tokens: Ints | Floats) -> Ints:
    octaves = np.log2(np.maximum(tokens, 1), dtype=np.float32)
    return np.minimum((_PER_OCTAVE * octaves).astype(np.intp), _CLASSES - 1)
