"""Runs the readers of the accuracy table against a gateway and an engine in their own processes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenflow_bench.processes import Program, find_nginx, gateway, get_json, nginx, replay_engine
from tokenflow_bench.readers.accuracy.measure import Accuracy, measure
from tokenflow_bench.readers.accuracy.observer import Observer
from tokenflow_bench.readers.accuracy.pages import Browsers
from tokenflow_bench.readers.accuracy.reader_process import ReaderProcess, Reading, Task
from tokenflow_bench.readers.accuracy.rows import Plan, Row, table_rows
from tokenflow_bench.readers.accuracy.trace import write_trace
from tokenflow_bench.readers.accuracy.truth import Positions, Truth
from tokenflow_bench.replay import recorded_text

__all__ = ["ENGINE_RATE", "AccuracyRun", "run_accuracy"]

ENGINE_RATE = 50.0
"""Tokens per second of each answer: five times as fast as the readers."""
_Read = Callable[[Sequence[str], Sequence[Task]], list[Reading]]
"""What the clients of these names did with these tasks."""
_PAGES_AT_A_TIME = 2
"""Four of them, drawn without a GPU on two cores, show their words late."""
_MODULES = {
    "socket": "tokenflow_bench.readers.accuracy.socket_reader",
    "python": "tokenflow_bench.readers.accuracy.python_reader",
}


@dataclass(frozen=True, kw_only=True)
class AccuracyRun:
    """How to run: `only` names rows, all if empty; `say` gets lines of progress.

    `traces`: an existing folder for a CSV of each reader.
    """

    plan: Plan
    repetitions: int
    seed: int
    say: Callable[[str], None]
    only: Collection[str] = ()
    traces: Path | None = None


def run_accuracy(how: AccuracyRun) -> dict[str, Any]:
    """All rows, as often as asked: the document's `accuracy` part, figures of each repetition in it.

    Raises `ValueError` if `only` names a row that there is not.
    """
    text = recorded_text()
    rng = random.Random(how.seed)  # noqa: S311 - draws reading speeds
    has_nginx = find_nginx() is not None
    if not has_nginx:
        how.say("NO NGINX HERE: its rows are left out (Debian, Ubuntu: apt-get install nginx-light)")
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="tokenflow-bench-") as folder, ExitStack() as stack:
        engine = stack.enter_context(replay_engine(Path(folder), rate=ENGINE_RATE))
        served = stack.enter_context(gateway(Path(folder), engine=engine))
        vias = {"direct": served}
        if has_nginx:
            vias["nginx"] = stack.enter_context(nginx(Path(folder), upstream=served))
        for repetition in range(how.repetitions):
            every = table_rows(how.plan, chars_per_token=text.chars_per_token, rng=rng)
            rows = [row for row in _wanted(every, how.only) if row.via in vias]
            for row, outcome in _repetition(how, rows, repetition, engine=engine, vias=vias):
                results.setdefault(row.name, _head(row))["repetitions"].append(asdict(outcome))
    return {
        "engine_tokens_per_s": ENGINE_RATE,
        "bytes_per_event": text.bytes_per_token,
        "plan": asdict(how.plan),
        "left_out": [] if has_nginx else ["nginx"],
        "rows": list(results.values()),
    }


def _wanted(rows: Sequence[Row], only: Collection[str]) -> Sequence[Row]:
    if unknown := set(only) - {row.name for row in rows}:
        names = ", ".join(row.name for row in rows)
        raise ValueError(f"no reader {', '.join(sorted(unknown))}; there are: {names}")
    return [row for row in rows if row.name in only] if only else rows


def _head(row: Row) -> dict[str, Any]:
    return {"name": row.name, "words": row.words, "target": asdict(row.target), "repetitions": []}


def _repetition(
    how: AccuracyRun, rows: Sequence[Row], number: int, *, engine: Program, vias: dict[str, Program]
) -> list[tuple[Row, Accuracy]]:
    """First the readers in processes, all together, then pages, few at a time. In the order of `rows`."""
    figures: dict[str, tuple[Row, Accuracy]] = {}
    pages = [row for row in rows if row.client == "page"]
    others = [row for row in rows if row.client != "page"]
    stages: list[tuple[str, list[Row], _Read]] = [
        ("sockets and Python", others, _in_processes),
        *(
            ("Chromium", pages[first : first + _PAGES_AT_A_TIME], _in_browsers)
            for first in range(0, len(pages), _PAGES_AT_A_TIME)
        ),
    ]
    for what, stage, read in stages:
        if not stage:
            continue
        how.say(
            f"accuracy {number + 1}/{how.repetitions}: {len(stage)} readers ({what}), "
            f"{how.plan.total_s:.0f} s"
        )
        tasks = [_task(row, number, vias[row.via]) for row in stage]
        with Observer(vias["direct"].url) as observer:
            readings = read([row.client for row in stage], tasks)
        for row, task, reading in zip(stage, tasks, readings, strict=True):
            samples, truth = observer.samples[task.model], _truth(engine, task, reading)
            outcome = measure(samples, truth)
            if how.traces is not None:
                write_trace(how.traces / f"{task.model}.csv", samples, truth)
            how.say(f"  {row.name:16} mean error {outcome.mean_error:6.2f} tokens  {_sources(outcome)}")
            figures[row.name] = (row, outcome)
    return [figures[row.name] for row in rows]


def _task(row: Row, repetition: int, via: Program) -> Task:
    model = f"{row.name}-{repetition}"
    return Task(url=via.url, model=model, segments=list(row.segments), options=row.options)


def _in_processes(clients: Sequence[str], tasks: Sequence[Task]) -> list[Reading]:
    readers = [ReaderProcess(_MODULES[client], task) for client, task in zip(clients, tasks, strict=True)]
    try:
        return [reader.result() for reader in readers]
    finally:
        for reader in readers:
            reader.kill()


def _in_browsers(clients: Sequence[str], tasks: Sequence[Task]) -> list[Reading]:
    assert set(clients) == {"page"}
    with Browsers.running() as browsers:
        return browsers.read(tasks)


def _truth(engine: Program, task: Task, reading: Reading) -> Truth:
    begin, end = reading.window
    return Truth(
        generated=Positions.of_events(get_json(f"{engine.url}/sent/{task.model}")),
        consumed=Positions(reading.positions),
        window=(begin, end),
        pauses=[(pause[0], pause[1]) for pause in reading.pauses],
        unread_bytes=[(at, unread) for at, unread in reading.unread],
        bytes_per_token=reading.bytes_per_token,
        receive_buffer_bytes=reading.receive_buffer_bytes,
    )


def _sources(outcome: Accuracy) -> str:
    return ", ".join(sorted(outcome.sources, key=lambda source: -outcome.sources[source]))
