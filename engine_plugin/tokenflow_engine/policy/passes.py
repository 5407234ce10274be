"""How long a pass may be: no longer than the tightest reader in the batch can bear."""

from __future__ import annotations

from tokenflow_engine.policy.slack import Line

__all__ = ["prefill_budget"]

_LEAST_TOKENS = 16


def prefill_budget(
    tightest_s: float, *, step_s: float, prefill: Line, share: float, least_share: float
) -> int | None:
    """Tokens to prefill beside one decode step of `step_s`, when the smallest slack is `tightest_s`.

    The pass may take `share` of that slack. A reader who gets one token a pass settles where a pass takes as
    long as it reads a token, at a slack of ``1 / (rate * share)``: so the rule finds its own balance under a
    burst of newcomers. Prefill gets at least `least_share` of a decode step, so that it never stands still.
    None: no limit.
    """
    if tightest_s == float("inf"):
        return None
    seconds = max(share * tightest_s - step_s, least_share * step_s)
    return max(int(seconds / max(prefill.per_token_s, 1e-12)), _LEAST_TOKENS)
