"""How far ahead of its reader each token of an answer came, and what that made the token worth."""

from __future__ import annotations

from array import array

__all__ = ["Leads"]

_FULL_SHARE, _NO_SHARE = 0.1, 0.2
"""Of the whole answer unread: up to which a token weighs 1, and from which it weighs nothing."""
_SAME_SHARE = 1e-6


class Leads:
    """Fed at each look at a reader, a few times a second; keeps twelve bytes for each that found more text.

    Readable tokens all. Between two looks, what is unread is taken to have changed evenly by the token.
    """

    __slots__ = ("_come", "_looks", "_unread")

    def __init__(self) -> None:
        self._come = 0
        self._unread = 0.0
        self._looks = array("f")  # by three: tokens that came, what was unread before them, and after

    def look(self, come: int, consumed: float) -> None:
        """So many tokens have come by now, and so many are read."""
        unread = max(0.0, come - consumed)
        if come > self._come:
            self._looks.extend((come - self._come, self._unread, unread))
            self._come = come
        self._unread = unread

    def effective_tokens(self) -> float:
        """The sum of the tokens' weights, by the length of what has come, which is to be all of the answer.

        w = 1 up to 10 % of the answer unread, 0 from 20 % on, linear between (TokenFlow, section 2;
        `tokenflow_bench.formulas.effective_tokens` has it token by token).
        """
        n, looks = self._come, self._looks
        return sum(
            new * _mean_weight(before / n, after / n)
            for new, before, after in zip(looks[0::3], looks[1::3], looks[2::3], strict=True)
        )


def _mean_weight(before: float, after: float) -> float:
    """The mean of the weight over a share unread that changes evenly."""
    if abs(after - before) < _SAME_SHARE:
        return _weight(before)
    return (_weight_up_to(after) - _weight_up_to(before)) / (after - before)


def _weight(share: float) -> float:
    return min(1.0, max(0.0, (_NO_SHARE - share) / (_NO_SHARE - _FULL_SHARE)))


def _weight_up_to(share: float) -> float:
    """The integral of `_weight` from 0."""
    sloping = min(max(share, _FULL_SHARE), _NO_SHARE) - _FULL_SHARE
    return min(share, _FULL_SHARE) + sloping - sloping**2 / (2 * (_NO_SHARE - _FULL_SHARE))
