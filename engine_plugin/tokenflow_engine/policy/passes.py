"""How long a pass may be: no longer than the tightest reader in the batch can bear."""

from __future__ import annotations

from tokenflow_engine.policy.slack import Line

__all__ = ["prefill_budget"]

_LEAST_TOKENS = 16
_LEAST_BASES = 2.0
"""A prefill pass of its own takes at least so many times as long as an empty one: shorter ones do no work."""


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
