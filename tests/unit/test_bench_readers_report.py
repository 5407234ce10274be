"""The report of a result, and the text that the replayed engine says."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tokenflow_bench.readers.report import page, terminal
from tokenflow_bench.replay import recorded_text


def case(*, p99_ms: float = 201.0, waited: float = 0.0) -> dict[str, Any]:
    return {
        "cpu_share": {"gateway": 0.4, "engine": 0.2, "clients": 0.1},
        "waited_share": waited,
        "tokens_per_s": 5000.0,
        "gaps": {"count": 1, "p50_ms": 200.0, "p99_ms": p99_ms, "worst_ms": 300.0},
        "idle_mib": 70.0,
        "kib_per_stream": 30.0,
        "unread_tokens_per_stopped": None,
        "report_us": 200.0,
    }


def repetition(*, p99_later_ms: float) -> dict[str, Any]:
    compared = {
        "kib_per_stopped": 60.0,
        "p50_later_ms": 0.1,
        "p99_later_ms": p99_later_ms,
        "look_us": 8.0,
    }
    return {"all_read": case(), "some_paused": case(), "unwatched": case(), "compared": compared}


DOCUMENT: dict[str, Any] = {
    "at": "2026-01-01T00:00:00Z",
    "command": "make bench-readers",
    "seed": 1,
    "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 4.0, "kernel": "6.1", "load_before": 0.1},
    "versions": {"commit": "abc", "python": "3.11"},
    "accuracy": {
        "engine_tokens_per_s": 50.0,
        "bytes_per_event": 259.0,
        "plan": {"before_s": 6, "pause_s": 5, "after_s": 9},
        "left_out": [],
        "rows": [],
    },
    "paused": {
        "streams": 1000,
        "stopped": 150,
        "reported": 150,
        "engine_tokens_per_s": 5.0,
        "window_s": 16,
        "gateway_cpus": [0],
        "other_cpus": [1],
        "repetitions": [repetition(p99_later_ms=late) for late in (1.0, 9.0, 2.0)],
    },
}


def line(text: str, words: str) -> str:
    return next(line for line in text.splitlines() if words in line)


def test_later_tokens_are_judged_by_their_median() -> None:
    assert line(page(DOCUMENT), "p99 later") == (
        "| p99 later than where all read, ms | - | 2.00 (1.00 to 9.00) | within 5 ms | met |"
    )
    late = copy.deepcopy(DOCUMENT)
    late["paused"]["repetitions"][0] = repetition(p99_later_ms=8.0)
    assert line(page(late), "p99 later").endswith("missed |")


@pytest.mark.parametrize("show", [page, terminal])
def test_a_busy_machine_and_a_missing_nginx_are_said_loudly(show: Any) -> None:
    assert "BUSY" not in show(DOCUMENT)
    assert "LEFT OUT" not in show(DOCUMENT)
    other = copy.deepcopy(DOCUMENT)
    other["paused"]["repetitions"][2]["unwatched"] = case(waited=0.2)
    other["accuracy"]["left_out"] = ["nginx"]
    assert "THE MACHINE WAS BUSY: the gateway waited 20% of the time for its core." in show(other)
    assert "LEFT OUT: the rows with nginx, which is not installed here." in show(other)


def test_the_engine_says_the_recorded_events_with_content() -> None:
    text = recorded_text()
    assert b'"role":"assistant"' in text.opening
    assert len(text.tokens) > 20
    assert all(event.startswith(b"data: {") and event.endswith(b"}\n\n") for event in text.tokens)
    assert b'"content":"The"' in text.tokens[0]
    assert 3 < text.chars_per_token < 7
