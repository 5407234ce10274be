"""What a run was like for those who wait, and for those who pay. Over all arrivals, unfinished ones too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenflow_bench.formulas import STALL_FREE_S
from tokenflow_bench.simulator import Outcome

__all__ = ["Metrics", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Seconds, tokens a second, shares from 0 to 1.

    *Wait* is TTFT + stall: how late the last token is read. *Effective* throughput is the paper's: tokens
    weigh 1 while the unread text is below 10 % of the whole answer, 0 above 20 %. It pays for slowness, so
    look at `raw` beside it.
    """

    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    wait_mean: float
    wait_p99: float
    stall_free: float
    raw: float
    effective: float
    preemptions: float
    """Per stream."""
    gigabytes: float
    retractions: int
    emergencies: int
    plans_per_s: float


def measure(outcome: Outcome) -> Metrics:
    """Of readers' streams; throughput counts machines' too. Who has no token yet has waited until now."""
    streams, work = outcome.streams, outcome.streams.work
    people = ~work.machine & (work.arrived <= outcome.duration_s)
    first = np.where(np.isnan(streams.first_at), outcome.duration_s, streams.first_at)
    ttft = (first - work.arrived)[people]
    stall = streams.stalled_s[people]
    duration = max(outcome.duration_s, 1e-9)
    return Metrics(
        ttft_mean=float(ttft.mean()),
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p99=float(np.percentile(ttft, 99)),
        wait_mean=float((ttft + stall).mean()),
        wait_p99=float(np.percentile(ttft + stall, 99)),
        stall_free=float((stall <= STALL_FREE_S).mean()),
        raw=float(streams.generated.sum()) / duration,
        effective=float(streams.useful.sum()) / duration,
        preemptions=float(streams.preemptions.mean()),
        gigabytes=outcome.bytes_moved / 1e9,
        retractions=outcome.retractions,
        emergencies=outcome.emergencies,
        plans_per_s=outcome.plans / duration,
    )
