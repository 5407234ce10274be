"""How long a prefill pass may be, and when to decode instead: what the tightest reader can bear."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Phase
from tokenflow_engine.policy.options import Options
from tokenflow_engine.policy.slack import Line

__all__ = ["Beginning", "Passes", "prefill_budget"]

_INFINITY = float("inf")
_PREFILLING = int(Phase.PREFILLING)
_LEAST_TOKENS = 16
_LEAST_BASES = 2.0
"""A prefill pass of its own takes at least so many times as long as an empty one: shorter ones do no work."""
_WORTHWHILE_BASES = 4.0
"""From so many times that on it is worth its base, if a prompt is cut: three quarters of it are work."""
_LEAST_GAIN = 0.05
"""Seconds of text in a second that a reader gains at least, when it is asked how long the last will wait."""
_PASSES_AHEAD = 4
"""Newcomers are let in for so many mixed passes; by then there is another plan."""


class Beginning(NamedTuple):
    """The next pass for newcomers."""

    wait_s: float
    """How long to decode before it."""
    tokens: float
    """How many of their tokens it computes at least."""


class Passes:
    """The prefill passes that a view allows. `tokens`: the longest one; None: no limit.

    Readers count who are in the batch or about to come back to it; of those, who has just been prefilled has
    its first token under way.
    """

    def __init__(
        self, view: EngineView, options: Options, *, slack: Floats, step_s: float, prefill: Line
    ) -> None:
        self._view, self._options, self._step_s, self._prefill = view, options, step_s, prefill
        readers = (view.started | view.running) & view.read
        rows = np.flatnonzero(readers)
        self._token_s = 1.0 / np.maximum(view.rate_high.take(rows), 1e-6)
        self._weight = view.weight.take(rows)
        self._decodes = view.running.take(rows)
        self._slack = np.where(view.generated.take(rows) > 0, slack.take(rows), self._token_s)
        self.tokens = prefill_budget(
            float(self._slack.min(initial=_INFINITY)),
            token_s=float(self._token_s.min(initial=1.0)),
            step_s=step_s,
            prefill=prefill,
            share=options.share,
            least_share=options.least_share,
            mixed=view.mixed,
        )

    def beginning(self, newcomers: list[int], *, late_s: float) -> Beginning:
        """How many newcomers to prefill in the next pass, and when, where one pass cannot decode too.

        Who has just begun has a token or two to read, and even a short prefill takes longer: a few decode
        steps first give it a lead that pays for the pass. Small passes are mostly base, and a large batch
        gains leads slowly, so that the last would wait long; a long pass keeps all waiting for its lead. Of
        passes of all, half, a quarter... of the newcomers, the one with which their first tokens come soonest
        in the mean, if those after it have to wait for the leads of those before them.

        Not for a lead that takes longer than `lead_s`, nor with a newcomer `hold_s` late (`late_s`: the
        latest is now), nor for a lighter class than theirs, nor for a reader nearly as fast as the engine.
        """
        view, options, prefill, step_s = self._view, self._options, self._prefill, self._step_s
        at_once = Beginning(0.0, _LEAST_TOKENS)
        patience_s = min(options.hold_s - late_s, options.lead_s)
        if view.mixed or patience_s <= 0:
            return at_once
        gains = self._decodes & (self._token_s > step_s)
        gains &= self._weight >= view.weight.take(newcomers).max()
        tokens, count = view.prefill.take(newcomers).cumsum(), len(newcomers)
        least = min(float(tokens[0]), prefill.within(_WORTHWHILE_BASES * prefill.base_s))
        sizes = [count >> halvings for halvings in range(count.bit_length())]
        passes = [least, *(float(tokens[size - 1]) for size in sizes)]
        token_s, waits_s = self._token_s[gains], self._waits_s(passes, gains)
        in_time = waits_s[0] < patience_s
        if not in_time.any():
            return at_once
        fastest = max(float(view.rate_high.take(newcomers).max()), 1e-6)
        shortest_s = min(float(token_s[in_time].min()), 1.0 / fastest)
        later_step_s = self._later_step_s(newcomers)
        gained = max(shortest_s / later_step_s - 1.0, _LEAST_GAIN)
        longest_s = waits_s.max(axis=1, where=in_time, initial=0.0).tolist()
        best, soonest_s = Beginning(longest_s[0], least), _INFINITY
        for size, pass_tokens, wait_s in zip(sizes, passes[1:], longest_s[1:], strict=True):
            if wait_s >= patience_s:
                continue
            groups = count / size
            pass_s = prefill.base_s + prefill.per_token_s * pass_tokens
            one_s = prefill.base_s + prefill.per_token_s * passes[1] / groups
            lacks_s = max((one_s + later_step_s) / options.share - shortest_s, 0.0)
            mean_s = wait_s + pass_s + (groups - 1.0) / 2 * (one_s + lacks_s / gained)
            if mean_s < soonest_s:
                best, soonest_s = Beginning(wait_s, pass_tokens), mean_s
        return best

    def _waits_s(self, passes: list[float], readers: Bools) -> Floats:
        """How long each of `readers` (columns) has to gain a lead that pays for a prefill of so many tokens.

        One row for each of `passes`.
        """
        token_s, step_s = self._token_s[readers], self._step_s
        ends_s = self._prefill.of(np.array(passes))[:, None] + step_s
        waits_s: Floats = ends_s / self._options.share - self._slack[readers]
        np.maximum(waits_s, 0.0, out=waits_s)
        waits_s *= ends_s > token_s
        waits_s /= token_s / step_s - 1.0
        return waits_s

    def _later_step_s(self, newcomers: list[int]) -> float:
        """A decode step when half of the newcomers have begun."""
        view, decoding = self._view, self._view.running
        context = float(view.context[decoding].sum()) + float(view.context.take(newcomers).sum()) / 2
        return view.costs.decode_s(int(np.count_nonzero(decoding)) + len(newcomers) // 2, context)

    def room(self, tokens: float, *, late_s: float, all_fit: bool) -> float:
        """Tokens of newcomers that one plan lets in, at least the `tokens` of `beginning`.

        While nobody reads, as many as can be in time begin together: those before them would run dry while
        the others are prefilled. `late_s`: how late the first is. `all_fit`: there are places for
        all, and only readers' leads count.
        """
        longest_s = _INFINITY if all_fit else self._options.prefill_ahead_s
        if self.tokens is None:
            return self._prefill.within(max(longest_s, -late_s))
        under_way = float(self._view.prefill[self._view.phase == _PREFILLING].sum())
        passes = _PASSES_AHEAD if self._view.mixed else 1
        return min(max(tokens, self._prefill.within(longest_s)), passes * self.tokens - under_way)

    def would_cut(self, tokens: int, room: float) -> bool:
        """Whether a prompt that fits into a pass would be cut in two by what is left of this one.

        Its rest would be a pass of its own, made at once, whatever readers can bear then.
        """
        if self.tokens is None or self._view.mixed:
            return False
        return room < tokens <= self.tokens


def prefill_budget(
    tightest_s: float,
    *,
    token_s: float,
    step_s: float,
    prefill: Line,
    share: float,
    least_share: float,
    mixed: bool,
) -> int | None:
    """Tokens to prefill for one decode step of `step_s`, when the smallest slack is `tightest_s`.

    Prefill and step together may take `share` of that slack, and in any case `token_s`, as long as the
    fastest reader takes over a token: who gets one a turn does not fall behind. Prefill gets at least
    `least_share` of a decode step, so that it never stands still. `mixed`: both are one pass, and have one
    base; else each has its own. None: no limit.
    """
    if tightest_s == float("inf"):
        return None
    seconds = max(share * tightest_s - step_s, token_s - step_s, least_share * step_s)
    if not mixed:
        seconds = max(seconds, _LEAST_BASES * prefill.base_s) - prefill.base_s
    return max(int(seconds / max(prefill.per_token_s, 1e-12)), _LEAST_TOKENS)
