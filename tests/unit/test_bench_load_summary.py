"""The figures of a run: over all arrivals, with what failed and what was not over."""

from __future__ import annotations

import math

import pytest

from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.load.reading import Person
from tokenflow_bench.load.summary import after_pauses, summarise

WHOLE = StreamLog(
    index=0,
    due_s=0.0,
    person=Person(1.0),
    output_tokens=4,
    token_s=[0.5, 1.0, 2.0, 3.0],  # read at 1.5, 2.5, 3.5, 4.5
    end_s=3.0,
)
STALLED = StreamLog(
    index=1,
    due_s=1.0,
    person=Person(1.0),
    output_tokens=2,
    token_s=[3.0, 6.0],  # read at 4.0 and, after two seconds without text, at 7.0
    end_s=6.0,
)
FAILED = StreamLog(
    index=2, due_s=2.0, person=Person(1.0), output_tokens=9, token_s=[4.0], end_s=4.5, error="gone"
)
SILENT = StreamLog(index=3, due_s=2.0, person=Person(1.0), output_tokens=9)
MACHINE = StreamLog(
    index=4, due_s=0.0, person=Person(math.inf), output_tokens=2, token_s=[1.0, 8.0], end_s=8.0
)


def test_latency_counts_from_the_schedule() -> None:
    """Sent a second late, the first token another second later: two seconds, as the reader sees it."""
    log = StreamLog(
        index=0, due_s=1.0, sent_s=2.0, person=Person(1.0), output_tokens=1, token_s=[3.0], end_s=3.0
    )
    assert summarise([log], horizon_s=10, window_s=5).ttft_mean_s == 2.0


def test_waits_over_all_arrivals() -> None:
    """TTFT 0.5, 2, 2 and 18 (to the horizon); stalls 0, 2, 15 (from 5 to the horizon), 0."""
    summary = summarise([WHOLE, STALLED, FAILED, SILENT], horizon_s=20, window_s=10)
    assert summary.ttft_mean_s == pytest.approx((0.5 + 2 + 2 + 18) / 4)
    assert summary.ttft_p50_s == 2
    assert summary.ttft_p99_s == 18
    assert summary.wait_mean_s == pytest.approx((0.5 + 4 + 17 + 18) / 4)
    assert summary.wait_p99_s == 18
    assert (summary.streams, summary.whole, summary.missing) == (4, 2, 2)


def test_shares_count_only_whole_answers() -> None:
    """One of four is stall-free; what never came is not."""
    summary = summarise([WHOLE, STALLED, FAILED, SILENT], horizon_s=20, window_s=10)
    assert summary.stall_free_share == 0.25
    assert summary.good_share == 0.25
    assert summarise([WHOLE], horizon_s=20, window_s=10, target_s=0.4).good_share == 0


def test_throughput() -> None:
    """Six tokens from 0 to 6 s; read within the first 4 s: three, and one of the other stream."""
    summary = summarise([WHOLE, STALLED], horizon_s=20, window_s=4)
    assert summary.raw_tokens_per_s == pytest.approx(6 / 6)
    assert summary.consumed_tokens_per_s == pytest.approx((3 + 1) / 4)


def test_machines_count_for_throughput_only() -> None:
    with_machine = summarise([WHOLE, MACHINE], horizon_s=20, window_s=4)
    assert with_machine.wait_mean_s == 0.5
    assert with_machine.raw_tokens_per_s == pytest.approx(6 / 8)


def _paused(token_s: list[float]) -> StreamLog:
    """One token a second; a pause from 2 to 12 s after the first token, which comes at 0."""
    person = Person.with_pauses(1.0, [(2.0, 12.0)])
    return StreamLog(index=0, due_s=0.0, person=person, output_tokens=9, token_s=token_s, end_s=token_s[-1])


def test_after_a_pause_with_text_ready() -> None:
    """Two read before, the third lies ready at 12, the fourth comes at 12.5."""
    (after,) = after_pauses(_paused([0.0, 0.0, 5.0, 12.5]), horizon_s=60)
    assert (after.text_s, after.new_token_s, after.stalls) == (0.0, 0.5, 0)


def test_after_a_pause_without_text() -> None:
    """All was read before; the next comes at 14, the one after it at 16: stalls of 2 and 1 s."""
    (after,) = after_pauses(_paused([0.0, 0.0, 14.0, 16.0]), horizon_s=60)
    assert (after.text_s, after.new_token_s, after.stalls) == (2.0, 2.0, 2)


def test_after_a_pause_when_all_has_come() -> None:
    """No new token is to come, and nobody waits for one."""
    (after,) = after_pauses(_paused([0.0, 0.0, 5.0, 5.0]), horizon_s=60)
    assert (after.text_s, after.new_token_s, after.stalls) == (0.0, None, 0)


def test_an_answer_read_before_its_pause_ends_is_left_out() -> None:
    assert after_pauses(_paused([0.0, 0.0]), horizon_s=60) == []


def test_after_a_pause_in_an_answer_that_never_went_on() -> None:
    log = _paused([0.0, 0.0])
    log.error = "gone"
    (after,) = after_pauses(log, horizon_s=60)
    assert (after.text_s, after.new_token_s) == (48.0, 48.0)
