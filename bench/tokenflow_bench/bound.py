"""The fluid limit: what an engine could give if streams took turns at no cost and nothing was done twice.

With B the most streams in a batch, M the KV memory, O_i and P_i the tokens of answer and prompt i, and
K = sum_i O_i (P_i + O_i / 2) the context tokens that all decode steps together read, whoever runs when:

- Steps are at least S = max(K / M, sum O / B, max O_i): none reads more than M, serves more than B streams,
  or one stream twice. So all work takes at least W = base S + per_stream sum O + per_context_token K +
  per_prompt_token sum P, which makes C = sum O / W tokens a second.
- As a fluid that is served at C: of the A(t) tokens asked for by t, no more than G(t) = min over s <= t of
  A(s-) + C (t - s) have been generated; raw throughput is sum O over the time at which G reaches it.
- Readers served at once would have read D(t) = sum_i min(r_i (t - a_i), O_i); no more than min(G, D) can have
  been read. Mean lateness of a token is at least the integral of (D - G)+ divided by sum O; lateness grows
  within a stream and ends as its wait (TTFT + stall), so this is also the least mean wait, streams counted by
  their length.
- First tokens need their prompts: the mean TTFT is at least that of prefills alone, shortest remaining first,
  which is optimal for the mean (Schrage 1968).

W is exact as a bound over the whole of a burst. Within a run an engine can be faster than C for a while, as
long as contexts are short, so a policy can come out slightly better than this limit.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.costs import Machine
from tokenflow_bench.workload import Workload

__all__ = ["Limit", "fluid_limit", "least_ttft_s", "least_work_s"]

Floats = NDArray[np.float64]

_POINTS = 2000
"""Of the time axis on which the integral is taken, beside the arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Best values. Names as in `metrics.Summary`. None with readers who pause or are machines."""

    ttft_mean_s: float
    raw_tokens_per_s: float
    wait_mean_s: float | None
    """Each stream counted by the length of its answer."""
    consumed_tokens_per_s: float | None
    """Within the time in which all, served at once, would have read everything."""


def fluid_limit(machine: Machine, workload: Workload) -> Limit:
    """See the module."""
    arrived, output = workload.arrived, workload.output.astype(np.float64)
    total = float(output.sum())
    capacity = total / least_work_s(machine, workload)
    asked = np.cumsum(output)
    before = asked - output
    done_s = float((arrived + (total - before) / capacity).max())
    wait_s = consumed = None
    if not workload.spans and not workload.machine.any():
        read_s = float((arrived + output / workload.rate).max())
        times = np.union1d(np.linspace(0.0, max(read_s, done_s), _POINTS), arrived)
        last = np.searchsorted(arrived, times, side="right") - 1
        least = np.minimum.accumulate(before - capacity * arrived)
        generated = np.where(last < 0, 0.0, np.minimum(least[last] + capacity * times, asked[last]))
        wanted = np.array([_wanted(workload, output, at) for at in times.tolist()])
        wait_s = float(np.trapezoid(np.maximum(wanted - generated, 0.0), times)) / total
        consumed = float(np.interp(read_s, times, np.minimum(wanted, generated))) / read_s
    return Limit(
        ttft_mean_s=least_ttft_s(machine, workload),
        raw_tokens_per_s=total / (done_s - float(arrived[0])),
        wait_mean_s=wait_s,
        consumed_tokens_per_s=consumed,
    )


def least_work_s(machine: Machine, workload: Workload) -> float:
    """W: seconds of the engine that the workload takes at least."""
    output = workload.output.astype(np.float64)
    total = float(output.sum())
    contexts = float((output * (workload.prompt + output / 2)).sum())
    steps = max(contexts / machine.kv_tokens, total / machine.max_running, float(output.max()))
    return (
        machine.step_base_s * steps
        + machine.step_per_stream_s * total
        + machine.step_per_context_token_s * contexts
        + machine.prefill_per_token_s * float(workload.prompt.sum())
    )


def least_ttft_s(machine: Machine, workload: Workload) -> float:
    """Mean time from arrival to the end of the prefill, shortest remaining first, nothing else to do."""
    left: list[float] = []
    now = flow_s = 0.0
    arrivals = [*zip(workload.arrived.tolist(), workload.prompt.tolist(), strict=True), (np.inf, 0)]
    for at, prompt in arrivals:
        while left and now < at:
            work_s = heapq.heappop(left)
            done = min(work_s, at - now)
            now += done
            flow_s += done * (len(left) + 1)
            if done < work_s:
                heapq.heappush(left, work_s - done)
        now = max(now, at)
        heapq.heappush(left, machine.prefill_per_token_s * prompt)
    return flow_s / len(workload) + machine.prefill_base_s


def _wanted(workload: Workload, output: Floats, at: float) -> float:
    """D: tokens that readers served at once would have read by `at`."""
    passed = np.maximum(at - workload.arrived, 0.0)
    return float(np.minimum(workload.rate * passed, output).sum())
