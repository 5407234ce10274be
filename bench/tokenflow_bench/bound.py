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
- In a burst: a token with c tokens of context takes at least per_stream + (per_context_token + base / M) c,
  so a reader who has read for u seconds takes r_i (per_stream + (...) (P_i + r_i u)) of the engine, if no
  token comes before it is to be read. What these leave prefills the others, first those who will take least
  of it for their prompt. Leaving out 1 % of the requests takes at most the work of the longest ones off the
  last one's TTFT: that is the least P99, unless readers wait for text.

W is exact as a bound over the whole of a burst. Within a run an engine can be faster than C for a while, as
long as contexts are short, so a policy can come out slightly better than this limit.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.costs import Machine
from tokenflow_bench.workload import Workload

__all__ = ["Limit", "fluid_limit", "least_ttft_p99_s", "least_ttft_s", "least_work_s"]

Floats = NDArray[np.float64]

_POINTS = 2000
"""Of the time axis on which the integral is taken, beside the arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Best values. Names as in `metrics.Summary`. None with readers who pause or are machines."""

    ttft_mean_s: float
    ttft_p99_s: float | None
    """Of a burst, while no reader waits for text; else None."""
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
    wait_s = consumed = ttft_p99_s = None
    if not workload.spans and not workload.machine.any():
        read_s = float((arrived + output / workload.rate).max())
        times = np.union1d(np.linspace(0.0, max(read_s, done_s), _POINTS), arrived)
        last = np.searchsorted(arrived, times, side="right") - 1
        least = np.minimum.accumulate(before - capacity * arrived)
        generated = np.where(last < 0, 0.0, np.minimum(least[last] + capacity * times, asked[last]))
        wanted = np.array([_wanted(workload, output, at) for at in times.tolist()])
        wait_s = float(np.trapezoid(np.maximum(wanted - generated, 0.0), times)) / total
        if arrived[0] == arrived[-1]:
            ttft_p99_s = least_ttft_p99_s(machine, workload)
        consumed = float(np.interp(read_s, times, np.minimum(wanted, generated))) / read_s
    return Limit(
        ttft_mean_s=least_ttft_s(machine, workload),
        ttft_p99_s=ttft_p99_s,
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


def least_ttft_p99_s(machine: Machine, workload: Workload) -> float:
    """P99 of the TTFT of a burst in which no reader ever waits for text; see the module."""
    engine = _Readers(machine)
    prefill_s = machine.prefill_per_token_s * workload.prompt
    for row in np.argsort(workload.rate / workload.prompt).tolist():
        engine.prefill(float(prefill_s[row]))
        engine.begins(int(workload.prompt[row]), int(workload.output[row]), float(workload.rate[row]))
    beyond = len(workload) // 100
    contexts = workload.output * (workload.prompt + workload.output / 2)
    whole_s = np.sort(prefill_s + engine.per_stream_s * workload.output + engine.per_context_s * contexts)
    longest_s = float(whole_s[len(workload) - beyond :].sum())
    return max(engine.now - longest_s, 0.0) + machine.prefill_base_s


class _Readers:
    """What an engine has left for prefills, while each reader gets each token when it is to be read.

    The share that goes to readers grows as their contexts do: ``level + slope * now``.
    """

    def __init__(self, machine: Machine) -> None:
        self.per_stream_s = machine.step_per_stream_s
        self.per_context_s = machine.step_per_context_token_s + machine.step_base_s / machine.kv_tokens
        self.now = 0.0
        self._level = self._slope = 0.0
        self._ends: list[tuple[float, float, float]] = []

    def begins(self, prompt: int, output: int, rate: float) -> None:
        """A reader, who reads on to the end of the answer."""
        slope = self.per_context_s * rate**2
        level = rate * (self.per_stream_s + self.per_context_s * prompt) - slope * self.now
        self._level, self._slope = self._level + level, self._slope + slope
        heapq.heappush(self._ends, (self.now + output / rate, level, slope))

    def prefill(self, work_s: float) -> None:
        """Go on until so much work is done."""
        while True:
            spare = max(1.0 - self._level - self._slope * self.now, 0.0)
            until = self._ends[0][0] if self._ends else math.inf
            takes_s = self._takes_s(work_s, spare)
            if self.now + takes_s <= until:
                self.now += takes_s
                return
            lasts_s = min(until - self.now, spare / self._slope)
            work_s -= spare * lasts_s - self._slope / 2 * lasts_s**2
            self.now, level, slope = heapq.heappop(self._ends)
            self._level, self._slope = self._level - level, self._slope - slope

    def _takes_s(self, work_s: float, spare: float) -> float:
        """Infinity: it is never done, as long as all go on reading."""
        root = spare**2 - 2.0 * self._slope * work_s
        return 2.0 * work_s / (spare + math.sqrt(root)) if root >= 0 and spare > 0 else math.inf


def _wanted(workload: Workload, output: Floats, at: float) -> float:
    """D: tokens that readers served at once would have read by `at`."""
    passed = np.maximum(at - workload.arrived, 0.0)
    return float(np.minimum(workload.rate * passed, output).sum())
