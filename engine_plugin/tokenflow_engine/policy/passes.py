"""How long a prefill pass may be, and when to decode instead: what the tightest reader can bear."""

from __future__ import annotations

import numpy as np

from tokenflow_engine.policy.base import EngineView, Floats, Phase
from tokenflow_engine.policy.options import Options
from tokenflow_engine.policy.rows import running, started
from tokenflow_engine.policy.slack import Line

__all__ = ["Passes", "prefill_budget"]

_INFINITY = float("inf")
_PREFILLING = int(Phase.PREFILLING)
_LEAST_TOKENS = 16
_LEAST_BASES = 2.0
"""A prefill pass of its own takes at least so many times as long as an empty one: shorter ones do no work."""
_WORTHWHILE_BASES = 4.0
"""From so many times that on it is worth its base: three quarters of it are work."""
_PASSES_AHEAD = 4
"""Newcomers are let in for so many mixed passes; by then there is another plan."""


class Passes:
    """The prefill passes that a view allows. `tokens`: the longest one; None: no limit.

    Readers count who are in the batch or about to come back to it; of those, who has just been prefilled has
    its first token under way.
    """

    def __init__(
        self, view: EngineView, options: Options, *, slack: Floats, step_s: float, prefill: Line
    ) -> None:
        self._view, self._options, self._step_s, self._prefill = view, options, step_s, prefill
        readers = (started(view) | running(view)) & ~view.machine & ~view.paused
        rows = np.flatnonzero(readers)
        self._token_s = 1.0 / np.maximum(view.rate_high.take(rows), 1e-6)
        self._weight = view.weight.take(rows)
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

    def wait_for_lead(self, newcomers: list[int], *, late_s: float) -> bool:
        """Whether to decode rather than to prefill for now, where one pass cannot do both.

        Who has just begun has a token or two to read, and even a short prefill takes longer. Passes that its
        reader does not notice are nearly all base; a few decode steps first give it a lead that pays for one
        that is worth its base, or does all there is to do. Not for a lead that takes longer than `lead_s`,
        nor with a newcomer `hold_s` late (`late_s`: the latest is now), nor for a lighter class than theirs.
        """
        view, step_s, prefill = self._view, self._step_s, self._prefill
        patience_s = self._options.hold_s - late_s
        if view.mixed or patience_s <= 0:
            return False
        all_s = prefill.base_s + prefill.per_token_s * float(view.prefill.take(newcomers).sum())
        pass_s = min(_WORTHWHILE_BASES * prefill.base_s, all_s)
        lacking = (pass_s + step_s) / self._options.share - self._slack
        lacking[self._token_s >= pass_s + step_s] = 0.0
        gained = self._token_s / step_s - 1.0
        pays = (lacking > 0) & (lacking < gained * min(patience_s, self._options.lead_s))
        pays &= self._weight >= view.weight.take(newcomers).max()
        return bool(pays.any())

    def room(self, *, late_s: float, all_fit: bool) -> float:
        """Tokens of newcomers that one plan lets in; the first of them is `late_s` late, or early.

        While nobody reads, as many as can be in time begin together: those before them would run dry while
        the others are prefilled. `all_fit`: there are places for all.
        """
        longest_s = _INFINITY if all_fit else self._options.prefill_ahead_s
        if self.tokens is None:
            return self._prefill.within(max(longest_s, -late_s))
        under_way = float(self._view.prefill[self._view.phase == _PREFILLING].sum())
        passes = _PASSES_AHEAD if self._view.mixed else 1
        return min(self._prefill.within(longest_s), passes * self.tokens - under_way)

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
