"""What the plugin costs an engine that needs no scheduling: two engines up at once, in turns, pair by pair.

Streams fit into memory with room to spare, they come one after the other, and the engine writes faster than
they are read, so that no policy has anything to give. Each pair runs the same texts on both engines, one
after the other, the next pair in the other order: what the machine does meanwhile hits both alike.

A first token beside other streams waits for the pass under way, which is chance. So it is also measured
with one stream at a time, in turns that are moments apart.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from support.gateway_process import GatewayProcess
from support.real_engine import RealEngine, wait_until
from tokenflow_bench.burst.capacity import middle_rate
from tokenflow_bench.burst.cores import Cores, pin, pin_engine, this_process
from tokenflow_bench.burst.others import group_cpu_s
from tokenflow_bench.burst.rounds import run_async
from tokenflow_bench.burst.setups import Setup
from tokenflow_bench.burst.turns import turns
from tokenflow_bench.load.asks import asks_of
from tokenflow_bench.load.driver import Client, Drive, drive
from tokenflow_bench.spread import median_interval
from tokenflow_bench.tables import Table, number

__all__ = ["COMPARED", "Pairs", "measure", "ratios", "table_of"]

_STREAMS = 16
_ROOM = 2.0
"""KV memory, in what all streams take at their ends: enough for the policy to leave the engine alone."""
_GAP_S = 0.4
"""Between two arrivals: a prompt is prefilled before the next one comes."""
_READS = 0.5
"""Of what the engine writes to each stream, what its reader reads: nobody is ever about to run dry."""
_HORIZON_S = 240.0
_REST_S = 3.0
"""Without requests, to see what an idle engine burns."""
_ALONE = 200
"""First tokens of each engine with nothing beside them."""
_ALONE_OUTPUT = 4
_ALONE_GAP_S = 0.02
"""Between the end of one and the next arrival."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two engines to compare, and what their environments differ in; the second one's figures over the first.

    `env` goes to both.
    """

    title: str
    first: str
    first_env: Mapping[str, str]
    second: str
    second_env: Mapping[str, str]
    env: Mapping[str, str]


COMPARED = (
    Pairs(
        "nobody waits, nothing to park",
        "stock engine",
        {"TOKENFLOW_PLUGIN": "off"},
        "plugin, adaptive",
        {"TOKENFLOW_POLICY": "adaptive"},
        {},
    ),
    Pairs(
        "every new token is copied to host memory",  # more than any policy asks for
        "no copies",
        {"TOKENFLOW_POLICY": "chaos:write_through=0"},
        "write-through",
        {"TOKENFLOW_POLICY": "chaos"},
        {"TOKENFLOW_CHAOS": "1:write"},
    ),
)


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    engine: RealEngine
    client: Client

    def rest(self) -> float:
        """Wait until nothing runs, forget cached prefixes; cores burnt in a moment without requests."""
        wait_until(self._flush, timeout_s=60, what="nothing runs", every_s=0.1)
        before = group_cpu_s(self.engine.pid)
        time.sleep(_REST_S)
        return (group_cpu_s(self.engine.pid) - before) / _REST_S

    def _flush(self) -> bool:
        request = urllib.request.Request(f"{self.engine.base_url}/flush_cache", data=b"")  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - our own program
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False


def measure(
    setup: Setup, *, pairs: int, seed: int, threads: int | None, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A table for each of `COMPARED`: the figures of all runs, and the ratios of each pair."""
    return [_compare(compared, setup, pairs, seed, threads, say) for compared in COMPARED]


def _compare(
    compared: Pairs, setup: Setup, pairs: int, seed: int, threads: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    cores = Cores(threads=threads or setup.threads)
    kv_tokens = int(_ROOM * _STREAMS * 1.25 * (2 * setup.prompt_words + setup.output)) // 16 * 16
    figures: dict[str, list[dict[str, float]]] = {compared.first: [], compared.second: []}
    say(f"{setup.name}, {compared.title}: {pairs} pairs of {_STREAMS} streams")
    with ExitStack() as stack:
        sides = [
            stack.enter_context(_side(name, setup, kv_tokens, cores, {**compared.env, **env}))
            for name, env in (
                (compared.first, compared.first_env),
                (compared.second, compared.second_env),
            )
        ]
        this_process(cores.others)
        speed = min(_run(side, setup, setup.rate, seed, "warm-up ")["tokens_per_s"] for side in sides)
        rate = _READS * speed / _STREAMS
        for number, side in turns(sides, pairs):
            shown = _run(side, setup, rate, seed + number, f"pair {number} ")
            figures[side.name].append(shown)
            say(
                f"  pair {number + 1}/{pairs}, {side.name}: {shown['tokens_per_s']:.1f} tokens/s, "
                f"TTFT {1e3 * shown['ttft_mean_s']:.0f} ms, idle {100 * shown['idle_cores']:.1f} % of a core"
            )
        alone = run_async(_first_tokens(sides, setup, rate, seed))
    return {
        "setup": setup.name,
        "title": compared.title,
        "sides": [compared.first, compared.second],
        "kv_tokens": kv_tokens,
        "streams": _STREAMS,
        "cores": cores.words(),
        "figures": figures,
        "ratios": ratios(*figures.values()),
        "alone_s": {side.name: seconds for side, seconds in zip(sides, alone, strict=True)},
    }


async def _first_tokens(sides: Sequence[_Side], setup: Setup, rate: float, seed: int) -> list[list[float]]:
    """Seconds from the request to the first token, one stream at a time: a list for each side."""
    work = setup.burst(_ALONE, seed=seed)
    work = replace(work, arrived=np.zeros(_ALONE), rate=np.full(_ALONE, rate))
    asks = [replace(ask, output_tokens=_ALONE_OUTPUT) for ask in asks_of(work, seed=seed, mark="alone ")]
    found: list[list[float]] = [[] for _ in sides]
    for turn, at in turns(range(len(sides)), _ALONE):
        await asyncio.sleep(_ALONE_GAP_S)
        run = await drive(sides[at].client, [asks[turn]], horizon_s=_HORIZON_S)
        log = run.logs[0]
        if not log.is_whole or log.sent_s is None:
            raise RuntimeError(f"{sides[at].name}: a stream failed: {log.error or 'too slow'}")
        found[at].append(log.token_s[0] - log.sent_s)
    return found


def ratios(first: list[dict[str, float]], second: list[dict[str, float]]) -> dict[str, list[float]]:
    """Of each pair, the second side's figure over the first's."""
    return {
        name: [b[name] / a[name] for a, b in zip(first, second, strict=True)]
        for name in ("tokens_per_s", "ttft_mean_s", "ttft_p50_s")
    }


def _run(side: _Side, setup: Setup, rate: float, seed: int, mark: str) -> dict[str, float]:
    """One run of all streams, read at `rate` each. Raises `RuntimeError` if one fails."""
    idle_cores = side.rest()
    work = setup.burst(_STREAMS, seed=seed)
    arrived = np.arange(_STREAMS, dtype=np.float64)
    arrived *= _GAP_S
    work = replace(work, arrived=arrived, rate=np.full(_STREAMS, rate))
    run: Drive = run_async(drive(side.client, asks_of(work, seed=seed, mark=mark), horizon_s=_HORIZON_S))
    failed = [log for log in run.logs if not log.is_whole]
    if failed:
        raise RuntimeError(f"{side.name}: {len(failed)} streams failed: {failed[0].error or 'too slow'}")
    ttft_s = sorted(log.token_s[0] - log.due_s for log in run.logs)
    return {
        "tokens_per_s": middle_rate(run.logs),
        "ttft_mean_s": fmean(ttft_s),
        "ttft_p50_s": ttft_s[len(ttft_s) // 2],
        "idle_cores": idle_cores,
    }


@contextmanager
def _side(name: str, setup: Setup, kv_tokens: int, cores: Cores, env: Mapping[str, str]) -> Iterator[_Side]:
    """An engine and its gateway, on their cores."""
    this_process(cores.all)
    with (
        tempfile.TemporaryDirectory(prefix="tokenflow-bench-") as folder,
        RealEngine(
            setup.model(), args=setup.flags(kv_tokens), env={"OMP_NUM_THREADS": str(cores.threads), **env}
        ) as engine,
        GatewayProcess(engine, Path(folder)) as gateway,
    ):
        pin_engine(engine.pid, cores)
        pin(gateway.pid, cores.others)
        if env.get("TOKENFLOW_PLUGIN") != "off":
            wait_until(
                lambda: bool(gateway.engine()["linked"]), timeout_s=20, what="gateway and plugin linked"
            )
        yield _Side(name, engine, Client(url=gateway.base_url, model=_model(gateway.base_url)))


def _model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:  # noqa: S310 - our own program
        return str(json.load(answer)["data"][0]["id"])


def table_of(tables: Sequence[Mapping[str, Any]]) -> Table:
    """Ratios of all comparisons: medians, and where those lie with 95 % confidence."""
    head = ["", "pairs", "throughput", "mean TTFT", "median TTFT", "TTFT alone", "a core, idle"]
    return Table(head, list(map(_row, tables)))


def _row(table: Mapping[str, Any]) -> list[str]:
    first, second = table["sides"]
    spreads = [_sure(values) for values in table["ratios"].values()]
    idle = (fmean(run["idle_cores"] for run in table["figures"][side]) for side in (second, first))
    return [
        f"{table['setup']}, {table['title']}: {second} / {first}",
        str(len(table["figures"][first])),
        *spreads,
        _alone(table["alone_s"][first], table["alone_s"][second]),
        " / ".join(f"{100 * cores:.1f} %" for cores in idle),
    ]


def _alone(first: Sequence[float], second: Sequence[float]) -> str:
    """The ratio, how many pairs it is of, and both medians."""
    both = " / ".join(f"{1e3 * median(seconds):.2f}" for seconds in (second, first))
    pairs = [b / a for a, b in zip(first, second, strict=True)]
    return f"{_sure(pairs)}; {both} ms, {len(pairs)} pairs"


def _sure(ratios: Sequence[float]) -> str:
    low, high = median_interval(ratios)
    return f"x{number(median(ratios), 3)} ({number(low, 3)} to {number(high, 3)})"
