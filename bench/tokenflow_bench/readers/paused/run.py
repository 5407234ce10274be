"""A thousand streams through a gateway on one core, without and with readers who have stopped."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from tokenflow_bench.processes import gateway, replay_engine
from tokenflow_bench.readers.paused.case import measure_case
from tokenflow_bench.readers.paused.measure import Usage, per_event_us, per_stopped_kib
from tokenflow_bench.readers.paused.plan import CASES, ENGINE_RATE, LOOKS_PER_S, OPENED_PER_S, Case, PausedRun

__all__ = ["run_paused"]

_FILES = 16_384
"""The gateway needs two sockets a stream; the limit is inherited."""


def run_paused(how: PausedRun) -> dict[str, Any]:
    """The document's `paused` part: all cases in each repetition, one after the other."""
    _raise_file_limit()
    repetitions = []
    with _cores() as (gateway_cpus, other_cpus):
        for number in range(how.repetitions):
            figures = {}
            for case in CASES:
                how.say(f"streams {number + 1}/{how.repetitions}: {how.streams}, {_describe(how, case)}")
                figures[case.name] = _run_case(how, case, cpus=gateway_cpus)
                how.say(_line(figures[case.name]))
            repetitions.append({**figures, "compared": _compare(how, **figures)})
    return {
        "streams": how.streams,
        "stopped": how.stopped,
        "reported": how.reported,
        "engine_tokens_per_s": ENGINE_RATE,
        "window_s": how.window_s,
        "gateway_cpus": list(gateway_cpus),
        "other_cpus": list(other_cpus),
        "repetitions": repetitions,
    }


def _run_case(how: PausedRun, case: Case, *, cpus: Sequence[int]) -> dict[str, Any]:
    """A fresh gateway, so that memory of an earlier case is not counted."""
    with tempfile.TemporaryDirectory(prefix="tokenflow-bench-") as folder:
        place = Path(folder)
        with (
            replay_engine(place, rate=ENGINE_RATE) as engine,
            gateway(place, engine=engine, cpus=cpus, module=case.module) as served,
        ):
            return uvloop.run(measure_case(how, case, engine=engine, served=served))


def _compare(
    how: PausedRun, *, all_read: dict[str, Any], some_paused: dict[str, Any], unwatched: dict[str, Any]
) -> dict[str, float]:
    looks = how.streams * LOOKS_PER_S * how.window_s
    return {
        "kib_per_stopped": per_stopped_kib(
            reading_kib=all_read["kib_per_stream"],
            mixed_kib=some_paused["kib_per_stream"],
            streams=how.streams,
            stopped=how.stopped,
        ),
        "p50_later_ms": some_paused["gaps"]["p50_ms"] - all_read["gaps"]["p50_ms"],
        "p99_later_ms": some_paused["gaps"]["p99_ms"] - all_read["gaps"]["p99_ms"],
        "look_us": per_event_us(
            Usage(cpu_s=unwatched["cpu_share"]["gateway"], wall_s=1.0),
            Usage(cpu_s=all_read["cpu_share"]["gateway"] * how.window_s, wall_s=how.window_s),
            events=round(looks),
        ),
    }


@contextmanager
def _cores() -> Iterator[tuple[list[int], list[int]]]:
    """One core for the gateway, the others for everything else, this process and its children included."""
    every = sorted(os.sched_getaffinity(0))
    first, others = every[:1], every[1:] or every
    os.sched_setaffinity(0, others)
    try:
        yield first, others
    finally:
        os.sched_setaffinity(0, every)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _describe(how: PausedRun, case: Case) -> str:
    who = f"{how.stopped} stop reading, {how.reported} say they pause" if case.pauses else "all read"
    watched = ", connections not looked at" if case.name == "unwatched" else ""
    seconds = how.streams / OPENED_PER_S + how.settle_s + how.window_s * (2 if case.costs_reports else 1)
    return f"{who}{watched}; {seconds:.0f} s"


def _line(case: dict[str, Any]) -> str:
    cpu, gaps = case["cpu_share"], case["gaps"]
    return (
        f"  {case['tokens_per_s']:.0f} tokens/s, {case['kib_per_stream']:.1f} KiB a stream, "
        f"gaps p50 {gaps['p50_ms']:.1f} p99 {gaps['p99_ms']:.1f} ms, CPU: gateway {cpu['gateway']:.0%}, "
        f"engine {cpu['engine']:.0%}, clients {cpu['clients']:.0%}"
    )
