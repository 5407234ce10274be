"""When the next text of a paced stream is due: as its reader needs it, not as the engine makes it.

Pure: the caller gives the time with every call (monotonic seconds). Positions are readable tokens.
"""

from __future__ import annotations

import math

from tokenflow_gateway.readers.estimator import Estimate

__all__ = ["LEAD_S", "Pacer"]

LEAD_S = 0.75
"""Reading that the client has before it is needed: what hides a short gap of the network or the engine."""
_LEAST_LEAD_TOKENS = 1.0
_ASSUMED = frozenset({"model", "learned"})
"""Sources without evidence of this stream: the fast end of their band is taken, so that few are held up."""


class Pacer:
    """Keeps a reader `LEAD_S` ahead of what he reads. Of a stream that begins, that much goes out at once."""

    __slots__ = ("_at", "_position")

    def __init__(self, *, now: float) -> None:
        self._at = now
        self._position = 0.0

    def wait_s(self, handed_over: int, estimate: Estimate, now: float) -> float:
        """Seconds until the text that follows the first `handed_over` tokens is due.

        0 if it is due now, infinity while the reader has paused. Holds for this estimate: another may come
        before the time is over.
        """
        self._advance(handed_over, estimate, now)
        if estimate.state == "ahead":
            return 0.0
        if estimate.state == "paused":
            return math.inf
        pace = _pace(estimate)
        lead = max(LEAD_S * pace, _LEAST_LEAD_TOKENS)
        return max(0.0, (handed_over - self._position - lead) / pace)

    def _advance(self, handed_over: int, estimate: Estimate, now: float) -> None:
        """Where the reader may be: at the estimate, or ahead of it at the pace assumed for him."""
        if estimate.source in _ASSUMED and estimate.state != "paused":
            reached = self._position + _pace(estimate) * max(0.0, now - self._at)
            self._position = max(estimate.consumed, min(reached, float(handed_over)))
        elif estimate.source not in _ASSUMED:
            self._position = estimate.consumed
        self._at = max(self._at, now)


def _pace(estimate: Estimate) -> float:
    return estimate.rate_high if estimate.source in _ASSUMED else estimate.rate
