"""From logs of streams to the figures of a run; the figures themselves are tested with the metrics."""

from __future__ import annotations

import json
from dataclasses import replace

from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.load.summary import summarise
from tokenflow_bench.reading import Person
from tokenflow_bench.sla import Sla

LATE = StreamLog(
    index=0, due_s=1.0, sent_s=2.0, person=Person(1.0), output_tokens=1, token_s=[3.0], end_s=3.0
)
"""Sent a second late, the first token another second later."""
FAILED = StreamLog(
    index=1, due_s=2.0, person=Person(1.0), output_tokens=9, token_s=[4.0], end_s=4.5, error="gone"
)
RUNNING = StreamLog(index=2, due_s=2.0, person=Person(1.0), output_tokens=9)


def test_latency_counts_from_the_schedule() -> None:
    """Two seconds, as the reader sees it: a driver that falls behind hides nothing (coordinated omission)."""
    assert summarise([LATE], horizon_s=10, window_s=5).figures.ttft_mean_s == 2.0


def test_what_failed_or_was_not_over_is_not_whole() -> None:
    figures = summarise([LATE, FAILED, RUNNING], horizon_s=20, window_s=5).figures
    assert (figures.streams, figures.whole, figures.missing) == (3, 1, 2)


def test_the_target_is_the_class_s_unless_one_is_given() -> None:
    patient = replace(LATE, sla=Sla(name="patient", ttft_target_s=3.0))
    kept = summarise([patient], horizon_s=10, window_s=5)
    missed = summarise([patient], horizon_s=10, window_s=5, target_s=1.0)
    assert (kept.figures.good_share, missed.figures.good_share) == (1.0, 0.0)
    assert list(kept.figures.classes) == ["patient"]


def test_documents_are_json() -> None:
    """With what the server says of prompts, and what pauses brought."""
    pausing = StreamLog(
        index=3,
        due_s=0.0,
        person=Person.with_pauses(1.0, [(0.5, 2.0)]),
        output_tokens=2,
        token_s=[0.0, 4.0],
        end_s=4.0,
        prompt_tokens=7,
    )
    document = summarise([LATE, pausing], horizon_s=10, window_s=5).document()
    assert json.loads(json.dumps(document))["prompt_tokens_mean"] == 7
    assert document["after_pause"]["pauses"] == 1
    assert summarise([LATE], horizon_s=10, window_s=5).document()["after_pause"] is None
    log = json.loads(json.dumps(pausing.document()))
    assert (log["read_s"], log["stalls"], log["pauses"]) == ([2.5, 5.0], [[2.5, 4.0]], [[0.5, 2.0]])
