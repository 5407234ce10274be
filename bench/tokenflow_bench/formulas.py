"""The formulas behind the metrics, each with its source. Seconds on one clock, tokens per second.

`token_s` and `read_s` are arrays as long as each other: when each token of one answer came, and when it had
been read (`reading.read_times`). Sources: *TokenFlow* (EuroSys '26, arXiv 2510.02758), *Andes* (arXiv
2404.16283), *DistServe* (OSDI '24, arXiv 2401.09670), Jain, Chiu and Hawe (DEC-TR-301, 1984).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FULL_SHARE",
    "LAMBDA",
    "MU",
    "NO_SHARE",
    "STALL_FREE_S",
    "capped_token_s",
    "effective_tokens",
    "fairness",
    "mean_lead_s",
    "mean_time_between_tokens",
    "quality_of_experience",
    "quality_of_service",
    "token_weight",
    "unread",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STALL_FREE_S = 0.2
"""A stream with at most this much stall in all is stall-free."""
FULL_SHARE, NO_SHARE = 0.1, 0.2
"""Of the whole answer unread: up to which a token weighs 1, and from which it weighs nothing."""
LAMBDA = MU = 1.0
"""Tokens that a second of TTFT and one of rebuffering cost in QoS. The paper leaves them open."""


def mean_time_between_tokens(token_s: Floats) -> float | None:
    """TBT (also TPOT) = (last - first) / (n - 1); None for fewer than two tokens (DistServe's TPOT)."""
    if len(token_s) < 2:
        return None
    return float(token_s[-1] - token_s[0]) / (len(token_s) - 1)


def unread(token_s: Floats, read_s: Floats) -> Ints:
    """B_ij of TokenFlow: tokens that have come and not been read as each token comes, that one included."""
    number = np.arange(len(token_s))
    return number + 1 - np.minimum(np.searchsorted(read_s, token_s, side="right"), number)


def token_weight(unread_share: Floats) -> Floats:
    """Weight w = 1 up to 10 % of the whole answer unread, 0 from 20 % on, linear between (TokenFlow).

    That is the paper's w = max(1 - alpha (B - tau), 0) with tau = 0.1 n and alpha = 1 / (0.1 n).
    """
    return np.clip((NO_SHARE - unread_share) / (NO_SHARE - FULL_SHARE), 0.0, 1.0)


def effective_tokens(token_s: Floats, read_s: Floats, *, output_tokens: int) -> float:
    """sum_j w(B_ij / n); over seconds, effective throughput (TokenFlow), with n = `output_tokens`.

    It rewards holding text back: an engine that is slow has little unread text. Never alone. A token of an
    answer of fewer than ten counts as unread by itself, and so weighs less than 1.
    """
    return float(token_weight(unread(token_s, read_s) / output_tokens).sum())


def capped_token_s(token_s: Floats, read_s: Floats, *, output_tokens: int) -> Floats:
    """When each token would come if text were held back until at most `FULL_SHARE` of the answer is unread.

    Token j (from 1) waits until j - cap tokens have been read, cap = max(floor(0.1 n), 1): d_j =
    max(c_j, read_{j - cap}). Nobody reads later for it, and all weigh 1. Tokens over the time until the last
    d_j are *capped* effective throughput: what this run makes with a pacer in front. No engine raises it by
    being slow. (Ours.)
    """
    cap = max(math.floor(FULL_SHARE * output_tokens), 1)
    capped = token_s.copy()
    capped[cap:] = np.maximum(token_s[cap:], read_s[:-cap])
    return capped


def quality_of_service(
    effective: Sequence[float], ttft_s: Sequence[float], rebuffer_s: Sequence[float], *, seconds: float
) -> float:
    """QoS = (1/T) sum_i (sum_j w_ij - lambda TTFT_i - mu rebuffer_i), in tokens a second (TokenFlow).

    w_ij are the weights of effective throughput, `effective` their sum for each stream; lambda = mu = 1 token
    a second.
    """
    return (sum(effective) - LAMBDA * sum(ttft_s) - MU * sum(rebuffer_s)) / seconds


def quality_of_experience(read_s: Floats, *, expected_first_s: float, rate: float) -> float:
    """QoE = 1 - S_delay / S_whole (Andes): areas between actual and expected reading.

    Expected is the first token at `expected_first_s`, read at `rate` from then on. S_whole is the area under
    that up to the end of the actual reading, sum_j (end - expected_j); S_delay is
    sum_j max(actual_j - expected_j, 0). Andes knows no pauses: a reader who pauses counts as served late.
    """
    if not len(read_s):
        return 0.0
    expected = expected_first_s + np.arange(1, len(read_s) + 1) / rate
    whole = float(np.maximum(read_s[-1] - expected, 0.0).sum())
    delay = float(np.maximum(read_s - expected, 0.0).sum())
    if whole <= 0:
        return 1.0 if delay <= 0 else 0.0
    return max(1 - delay / whole, 0.0)


def mean_lead_s(token_s: Floats, read_s: Floats, *, rate: float) -> float:
    """Mean of B_ij / rate: how many seconds of reading lie ready when a token comes. 0 for a machine."""
    if not len(token_s) or math.isinf(rate):
        return 0.0
    return float(unread(token_s, read_s).mean()) / rate


def fairness(values: Sequence[float]) -> float:
    """Jain's index (sum x)^2 / (n sum x^2): 1 if all are alike, 1/n if one has everything; NaN of none."""
    squares = sum(value * value for value in values)
    if not values or squares == 0:
        return math.nan if not values else 1.0
    return sum(values) ** 2 / (len(values) * squares)
