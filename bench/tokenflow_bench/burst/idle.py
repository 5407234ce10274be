"""What the plugin costs an engine that needs no scheduling: two engines up at once, in turns, pair by pair.

Streams fit into memory with room to spare, they come one after the other, and the engine writes faster than
they are read, so that no policy has anything to give. Each pair runs the same texts on both engines, one
after the other. Runs take seconds and pairs are many: a machine's speed changes within minutes, by more than
what is looked for. The order is always the same, as an engine that has just run is faster: its weights are in
the cache. So none ever follows itself.

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
from tokenflow_bench.load.driver import Ask, Client, Drive, drive
from tokenflow_bench.spread import median_interval
from tokenflow_bench.tables import Table, number

__all__ = ["COMPARED", "Pairs", "measure", "ratios", "table_of"]

_STREAMS = {"tiny": 8, "smollm2": 4}
"""Of a run with each set-up."""
_ROOM = 2.0
"""KV memory, in what all streams take at their ends: enough for the policy to leave the engine alone."""
_GAP_S = {"tiny": 0.1, "smollm2": 0.4}
"""Between two arrivals: a prompt is prefilled before the next one comes, so there is nothing to schedule."""
_DECODE_S = 3.0
"""What a stream's tokens take in a full batch: with less, the middle of a run is without some streams."""
_LEAST_OUTPUT = 16
_READS = 0.5
"""Of what the engine writes to each stream, what its reader reads: nobody is ever about to run dry."""
_HORIZON_S = 240.0
_IDLE_S = 15.0
"""Without requests, before the first pair and after the last one, to see what an idle engine burns."""
_SAY_EVERY = 10
"""Pairs."""
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

    def settle(self) -> None:
        """Wait until nothing runs, forget cached prefixes."""
        wait_until(self._flush, timeout_s=60, what="nothing runs", every_s=0.02)

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
    streams = _STREAMS[setup.name]
    kv_tokens = int(_ROOM * streams * 1.25 * (2 * setup.prompt_words + setup.output)) // 16 * 16
    figures: dict[str, list[dict[str, float]]] = {compared.first: [], compared.second: []}
    with ExitStack() as stack:
        sides = [
            stack.enter_context(_side(name, setup, kv_tokens, cores, {**compared.env, **env}))
            for name, env in (
                (compared.first, compared.first_env),
                (compared.second, compared.second_env),
            )
        ]
        this_process(cores.others)
        warm_up = _asks(setup, setup.rate, setup.output, seed, "warm-up ")
        speed = min(_run(side, warm_up)["tokens_per_s"] for side in sides) / streams
        rate, output = _READS * speed, min(max(round(_DECODE_S * speed), _LEAST_OUTPUT), setup.output)
        say(f"{setup.name}, {compared.title}: {pairs} pairs of {streams} streams of {output} tokens")
        idle_cores = [_idle_cores(sides)]
        for number in range(pairs):
            asks = _asks(setup, rate, output, seed + number, f"pair {number} ")
            for side in sides:
                figures[side.name].append(_run(side, asks))
            if (number + 1) % _SAY_EVERY == 0:
                so_far = ratios(*figures.values())
                said = ", ".join(f"{name} {_sure(values)}" for name, values in so_far.items())
                say(f"  {number + 1} of {pairs} pairs: {said}")
        idle_cores.append(_idle_cores(sides))
        alone = run_async(_first_tokens(sides, setup, rate, seed))
    return {
        "setup": setup.name,
        "title": compared.title,
        "sides": list(figures),
        "kv_tokens": kv_tokens,
        "streams": streams,
        "output": output,
        "cores": cores.words(),
        "figures": figures,
        "ratios": ratios(*figures.values()),
        "idle_cores": dict(zip(figures, zip(*idle_cores, strict=True), strict=True)),
        "alone_s": dict(zip(figures, alone, strict=True)),
    }


def _idle_cores(sides: Sequence[_Side]) -> list[float]:
    """What each engine burns without requests, at the same time."""
    for side in sides:
        side.settle()
    before = [group_cpu_s(side.engine.pid) for side in sides]
    time.sleep(_IDLE_S)
    return [(group_cpu_s(side.engine.pid) - was) / _IDLE_S for side, was in zip(sides, before, strict=True)]


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
        for name in ("tokens_per_s", "ttft_mean_s")
    }


def _asks(setup: Setup, rate: float, output: int, seed: int, mark: str) -> list[Ask]:
    """Those of a run: all equally long, so that its middle has a full batch; each read at `rate`."""
    streams = _STREAMS[setup.name]
    arrived = _GAP_S[setup.name] * np.arange(streams, dtype=np.float64)
    work = replace(setup.burst(streams, seed=seed), arrived=arrived, rate=np.full(streams, rate))
    return [replace(ask, output_tokens=output) for ask in asks_of(work, seed=seed, mark=mark)]


def _run(side: _Side, asks: Sequence[Ask]) -> dict[str, float]:
    """Figures of one run. Raises `RuntimeError` if one fails."""
    side.settle()
    run: Drive = run_async(drive(side.client, asks, horizon_s=_HORIZON_S))
    failed = [log for log in run.logs if not log.is_whole]
    if failed:
        raise RuntimeError(f"{side.name}: {len(failed)} streams failed: {failed[0].error or 'too slow'}")
    return {
        "tokens_per_s": middle_rate(run.logs),
        "ttft_mean_s": fmean(log.token_s[0] - log.due_s for log in run.logs),
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
        url = gateway.base_url
        yield _Side(name, engine, Client(url=url, model=_model(url), body={"ignore_eos": True}))


def _model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:  # noqa: S310 - our own program
        return str(json.load(answer)["data"][0]["id"])


def table_of(tables: Sequence[Mapping[str, Any]]) -> Table:
    """Ratios of all comparisons: medians, and where those lie with 95 % confidence."""
    head = ["", "pairs", "throughput", "mean TTFT", "TTFT alone", "a core, idle"]
    return Table(head, list(map(_row, tables)))


def _row(table: Mapping[str, Any]) -> list[str]:
    first, second = table["sides"]
    spreads = [_sure(values) for values in table["ratios"].values()]
    idle = (fmean(table["idle_cores"][side]) for side in (second, first))
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
