"""What an engine can generate, measured: the denominator of load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tokenflow_bench.load.asks import asks_of
from tokenflow_bench.load.driver import Ask, Client, Drive, drive
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.reading import Person
from tokenflow_bench.workload import Workload

__all__ = ["Capacity", "measure_capacity", "middle_rate"]

_FROM, _TO = 0.2, 0.8
_HORIZON_S = 240.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Tokens per second with memory full and others waiting, and the KV tokens of a whole stream."""

    tokens_per_s: float
    footprint_tokens: float


async def measure_capacity(client: Client, work: Workload, *, seed: int) -> Capacity:
    """As many machines at once as `work` has rows, more than fit into memory.

    Raises `RuntimeError` if one fails.
    """
    asks = [_as_machine(ask) for ask in asks_of(work, seed=seed, mark=f"capacity {seed}-")]
    run: Drive = await drive(client, asks, horizon_s=_HORIZON_S)
    failed = [log for log in run.logs if not log.is_whole]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(asks)} streams failed: {failed[0].error or 'too slow'}")
    footprint = fmean((log.prompt_tokens or 0) + len(log.token_s) for log in run.logs)
    return Capacity(middle_rate(run.logs), footprint)


def middle_rate(logs: Sequence[StreamLog]) -> float:
    """Tokens per second between the first fifth of all tokens and the last one.

    So without the start, and without the end, when memory is no longer full.
    """
    times = sorted(at for log in logs for at in log.token_s)
    begin, end = int(_FROM * len(times)), int(_TO * len(times))
    return (end - begin) / (times[end] - times[begin])


def _as_machine(ask: Ask) -> Ask:
    person = Person(math.inf)
    return Ask(due_s=0.0, prompt=ask.prompt, output_tokens=ask.output_tokens, person=person)
