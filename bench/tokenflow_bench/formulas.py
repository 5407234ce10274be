"""The metrics of one stream, each from the times its tokens came and were read.

Times in seconds on one clock, rates in tokens per second. `token_s` and `read_s` are as long as each other:
when a token came, and when it had been read. The unread text when token j comes, itself included, is the
paper's B_ij.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

__all__ = [
    "STALL_FREE_S",
    "effective_tokens",
    "mean_lead_s",
    "quality_of_experience",
    "quality_of_service",
    "token_weight",
    "unread",
]

STALL_FREE_S = 0.2
"""A stream with at most this much stall in all is stall-free."""
FULL_SHARE, NO_SHARE = 0.1, 0.2
"""Of the whole answer unread: up to which a token weighs 1, and from which it weighs nothing."""
LAMBDA = MU = 1.0
"""Tokens that a second of TTFT and one of rebuffering cost in QoS. The paper leaves them open."""


def unread(token_s: Sequence[float], read_s: Sequence[float]) -> Iterator[int]:
    """B_ij: tokens that have come and have not been read, at each token's coming, that one included."""
    read = 0
    for number, at in enumerate(token_s, start=1):
        while read < number - 1 and read_s[read] <= at:
            read += 1
        yield number - read


def token_weight(unread_share: float) -> float:
    """1 up to 10 % of the whole answer unread, 0 from 20 % on, linear between (TokenFlow, EuroSys '26)."""
    return min(max((NO_SHARE - unread_share) / (NO_SHARE - FULL_SHARE), 0.0), 1.0)


def effective_tokens(token_s: Sequence[float], read_s: Sequence[float], *, output_tokens: int) -> float:
    """The sum of `token_weight`; over seconds, the paper's effective throughput.

    It rewards holding text back: an engine that is slow has little unread text. Never alone.
    """
    return sum(token_weight(behind / output_tokens) for behind in unread(token_s, read_s))


def quality_of_service(
    effective: Sequence[float], ttft_s: Sequence[float], rebuffer_s: Sequence[float], *, seconds: float
) -> float:
    """QoS = (1/T) sum_i (sum_j w_ij - lambda TTFT_i - mu rebuffer_i), in tokens a second (TokenFlow).

    w_ij are the weights of effective throughput, `effective` their sum for each stream.
    """
    return (sum(effective) - LAMBDA * sum(ttft_s) - MU * sum(rebuffer_s)) / seconds


def quality_of_experience(read_s: Sequence[float], *, expected_first_s: float, rate: float) -> float:
    """QoE = 1 - S_delay / S_whole (Andes, arXiv 2404.16283): areas between actual and expected reading.

    Expected is the first token at `expected_first_s`, read at `rate` from then on. S_whole is the area under
    that up to the end of the actual reading, sum_j (end - expected_j); S_delay is
    sum_j max(actual_j - expected_j, 0).
    """
    if not read_s:
        return 0.0
    end = read_s[-1]
    expected = [expected_first_s + number / rate for number in range(1, len(read_s) + 1)]
    whole = sum(max(end - at, 0.0) for at in expected)
    delay = sum(max(actual - at, 0.0) for actual, at in zip(read_s, expected, strict=True))
    if whole <= 0:
        return 1.0 if delay <= 0 else 0.0
    return max(1 - delay / whole, 0.0)


def mean_lead_s(token_s: Sequence[float], read_s: Sequence[float], *, rate: float) -> float:
    """Mean of B_ij / rate: how many seconds of reading lie ready when a token comes."""
    if not token_s or math.isinf(rate):
        return 0.0
    return sum(unread(token_s, read_s)) / len(token_s) / rate
