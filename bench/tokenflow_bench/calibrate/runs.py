"""The short runs from which costs are fitted: streams that come one after the other and leave again.

Everything that costs varies by itself: the batch grows and shrinks, prompts of many lengths are prefilled
while others run, and mixtures of few long and many short streams tell contexts from streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import numpy as np

from tokenflow_bench.calibrate.fit import Costs, fit
from tokenflow_bench.load.asks import asks_of
from tokenflow_bench.load.cli import MAX_LAG_MS
from tokenflow_bench.load.driver import Client, Drive, drive
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.workload import Workload

__all__ = ["calibrate", "ramp"]

_MIXTURES = ((24, 0.2), (12, 0.6), (8, 0.4))
"""How many streams memory is to hold, and the share of the prompt in a stream's tokens."""
_STREAM_TOKENS = (48, 1024)
"""Of a whole stream, at least and at most."""
_OVERHEAD_TOKENS = 48
"""Of a chat template and the head of a text: kept free for each stream."""
_AT_ONCE = 0.8
"""Of the streams that fit, how many come: nobody is to wait, and nothing to be preempted."""
_MOST_STREAMS = 32
_PROBE_TOKENS = 24
_HORIZON_S = 300.0
_TRIES = 3


def ramp(count: int, prompt: float, output: float, *, step_s: float, seed: int) -> Workload:
    """`count` streams: one, one, two, four at a time and so on, so that passes prefill one prompt and many.

    The last ones come when the first one is at most half-way through its answer, if a step takes `step_s`.
    """
    rng = np.random.default_rng(seed)
    group = np.ceil(np.log2(np.arange(1, count + 1)))
    return Workload.of(
        group / (group[-1] + 1) * 0.5 * output * step_s,
        np.maximum(rng.uniform(0.25, 1.75, count) * prompt, 1.0).astype(np.int64),
        np.maximum(rng.uniform(0.75, 1.25, count) * output, 4.0).astype(np.int64),
        np.ones(count),
    )


async def calibrate(
    client: Client,
    *,
    kv_tokens: int,
    max_running: int,
    seed: int,
    rounds: int,
    say: Callable[[str], None],
    max_lag_ms: float = MAX_LAG_MS,
) -> Costs:
    """Run and fit. A run whose driver was late is done again.

    Raises `RuntimeError` if a stream fails or the driver is always late, `ValueError` as `fit`.
    """
    client = replace(client, body=client.body | {"ignore_eos": True})
    step_s = await _probe(client, seed)
    say(f"a step takes {1000 * step_s:.1f} ms alone; {rounds} x {len(_MIXTURES)} short runs")
    runs: list[Sequence[StreamLog]] = []
    for number in range(rounds):
        for streams, share in _MIXTURES:
            tokens = _stream_tokens(kv_tokens, streams)
            count = int(min(_AT_ONCE * kv_tokens / (tokens + _OVERHEAD_TOKENS), max_running, _MOST_STREAMS))
            prompt, output = share * tokens, (1.0 - share) * tokens
            work = ramp(max(count, 2), prompt, output, step_s=step_s, seed=seed + number)
            mark = f"calibration {seed}-{number}-{streams} "
            for attempt in range(_TRIES):
                run = await _run(client, work, seed=seed + number, mark=f"{mark}{attempt} ")
                objection = run.overhead.objection(max_lag_ms=max_lag_ms)
                if objection is None:
                    break
                say(f"not to be used: {objection}; try {attempt + 1} of {_TRIES}")
            if objection is not None:
                raise RuntimeError(f"not to be used: {objection}")
            runs.append(run.logs)
    return fit(runs)


def _stream_tokens(kv_tokens: int, streams: int) -> int:
    least, most = _STREAM_TOKENS
    return min(max(kv_tokens // streams - _OVERHEAD_TOKENS, least), most)


async def _probe(client: Client, seed: int) -> float:
    """Seconds between the tokens of one stream alone; the first run warms up."""
    for number in range(2):
        alone = ramp(1, 16, _PROBE_TOKENS, step_s=0.0, seed=seed)
        run = await _run(client, alone, seed=seed, mark=f"probe {seed}-{number} ")
    times = run.logs[0].token_s
    return median(after - before for before, after in pairwise(times))


async def _run(client: Client, work: Workload, *, seed: int, mark: str) -> Drive:
    machines = replace(work, machine=np.ones(len(work), dtype=bool))
    run: Drive = await drive(client, asks_of(machines, seed=seed, mark=mark), horizon_s=_HORIZON_S)
    failed = [log for log in run.logs if not log.is_whole]
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(run.logs)} streams failed: {failed[0].error or 'too slow'}"
        )
    return run
