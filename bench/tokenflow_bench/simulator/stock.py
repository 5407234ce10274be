"""How SGLang 0.5.23 admits and retracts by itself: `PrefillAdder`, `retract_decode`, `NewTokenRatioTracker`.

A newcomer needs room for its prompt and all it may generate (clipped); running requests reserve a share, the
*new token ratio*, of what they may generate yet. The ratio starts at 0.7, falls to 0.098 within 600 decode
steps, and jumps to what the survivors need after a retraction.
"""

from __future__ import annotations

import numpy as np

from tokenflow_bench.simulator.streams import Rows, Streams

__all__ = ["Reserve"]

_CLIP = 4096
_INITIAL, _LEAST_FACTOR, _DECAY_STEPS, _RETRACT_STEPS = 0.7, 0.14, 600, 20


class Reserve:
    """The engine's reserve for output growth."""

    def __init__(self) -> None:
        self._ratio = _INITIAL

    def reset(self) -> None:
        """The engine is idle."""
        self._ratio = _INITIAL

    def decoded(self) -> None:
        """One decode step without a retraction."""
        least = _INITIAL * _LEAST_FACTOR
        self._ratio = max(self._ratio - (_INITIAL - least) / _DECAY_STEPS, least)

    def retracted(self, streams: Streams, kept: Rows) -> None:
        """Some were retracted, `kept` run on."""
        decoded = int(streams.generated[kept].sum()) + _RETRACT_STEPS * len(kept)
        self._ratio = min(decoded / (int(streams.work.max_output[kept].sum()) + 1), 1.0)

    def room(self, streams: Streams, running: Rows, *, free: int) -> float:
        """Tokens that may be promised to newcomers."""
        left = np.minimum(streams.work.max_output[running] - streams.generated[running], _CLIP)
        return free - self._ratio * float(left.sum())

    @staticmethod
    def most_output(streams: Streams, row: int) -> int:
        """What a newcomer is taken to generate."""
        return min(max(int(streams.work.max_output[row] - streams.generated[row]), 0), _CLIP)

    @staticmethod
    def retraction_order(streams: Streams, running: Rows) -> Rows:
        """First to be retracted first: the fewest generated tokens, then the longest prompt."""
        return running[np.lexsort((-streams.work.prompt[running], streams.generated[running]))]
