"""The bench of readers against the real gateway, once and short: it measures, and it can tell a liar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tokenflow_bench.readers.accuracy.rows import Plan
from tokenflow_bench.readers.accuracy.run import AccuracyRun, run_accuracy
from tokenflow_bench.readers.accuracy.verdict import RowSummary, verdict
from tokenflow_bench.readers.paused.plan import PausedRun
from tokenflow_bench.readers.paused.run import run_paused
from tokenflow_bench.readers.report import page, terminal

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that the bench starts find it as this one does."""
    paths = [str(ROOT / "bench"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def measured(*names: str) -> dict[str, Any]:
    plan = Plan(before_s=2, pause_s=2, after_s=2)
    return run_accuracy(AccuracyRun(plan=plan, repetitions=1, seed=1, say=print, only=names))


def test_the_error_of_an_honest_reader_is_small_and_that_of_a_liar_large() -> None:
    """Same socket, same pace, same route: one reports its position, the other twice that."""
    accuracy = measured("honest", "liar")
    honest, liar = (RowSummary.of(row) for row in accuracy["rows"])
    assert honest.source == liar.source == "progress"
    assert honest.mean_error.median is not None
    assert honest.mean_error.median < 2
    assert liar.mean_error.median is not None
    assert liar.mean_error.median > 20
    assert verdict(liar) == "met"


def test_a_page_and_the_python_client_are_known_to_a_few_tokens() -> None:
    """Loose bounds: this machine may be busy. The bench itself says how well it does."""
    accuracy = measured("js-pause", "python-paused", "socket-pauses")
    page_row, python_row, socket_row = (RowSummary.of(row) for row in accuracy["rows"])
    for row in (page_row, python_row):
        assert row.pauses == 1
        assert row.mean_error.median is not None
        assert row.mean_error.median < 5
        assert row.pause_noticed_ms.median is not None
        assert row.pause_noticed_ms.median < 1500
    assert (socket_row.hidden_bytes.median or 0) > 10_000, "all that it has not read lies in its own kernel"
    assert "JS client, pause button" in terminal({"accuracy": accuracy})


def test_streams_that_stop_are_measured_and_lose_nothing() -> None:
    how = PausedRun(streams=40, stopped=8, reported=8, settle_s=1, window_s=3, repetitions=1, say=print)
    before = os.sched_getaffinity(0)
    paused = run_paused(how)
    assert os.sched_getaffinity(0) == before
    (run,) = paused["repetitions"]
    assert run["all_read"]["tokens_per_s"] == pytest.approx(200, rel=0.1)
    assert run["some_paused"]["tokens_per_s"] == pytest.approx(5 * 32, rel=0.1)
    assert run["all_read"]["gaps"]["p50_ms"] == pytest.approx(200, abs=20)
    assert run["all_read"]["kib_per_stream"] > 0
    assert run["all_read"]["report_us"] > 0
    assert run["unwatched"]["tokens_per_s"] == pytest.approx(200, rel=0.1)
    assert "| p99 later than where all read, ms |" in page_of(paused)


def page_of(paused: dict[str, Any]) -> str:
    head: dict[str, Any] = {
        "at": "now",
        "command": "make bench-readers",
        "seed": 1,
        "machine": {"cpu": "c", "cores": 2, "memory_gib": 4, "kernel": "6", "load_before": 0.1},
        "versions": {"commit": "abc", "python": "3"},
    }
    return page({**head, "paused": paused})
