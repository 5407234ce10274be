"""The figures of a run: over all arrivals, with what failed and what was not over. By hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tokenflow_bench.metrics import Record, StreamFigures, Summary, summarise
from tokenflow_bench.reading import Person


def record(
    due_s: float,
    token_s: Sequence[float],
    *,
    person: Person | None = None,
    asked: int | None = None,
    sla: str = "all",
) -> Record:
    """Whole unless it was asked for more than came; one token a second is read."""
    return Record(
        due_s=due_s,
        token_s=np.array(token_s, dtype=float),
        person=person or Person(1.0),
        output_tokens=len(token_s) if asked is None else asked,
        is_whole=asked is None,
        sla=sla,
    )


WHOLE = record(0.0, [0.5, 1.0, 2.0, 3.0])
"""Read at 1.5, 2.5, 3.5, 4.5."""
STALLED = record(1.0, [3.0, 6.0])
"""Read at 4 and, after two seconds without text, at 7."""
CUT_OFF = record(2.0, [4.0], asked=9)
SILENT = record(2.0, [], asked=9)
MACHINE = record(0.0, [1.0, 8.0], person=Person(math.inf))
EVERYBODY = [WHOLE, STALLED, CUT_OFF, SILENT]


def figures(one: Record) -> StreamFigures:
    return StreamFigures.of(one, horizon_s=20, window_s=10)


def of(records: Sequence[Record], *, window_s: float = 10) -> Summary:
    return summarise(records, horizon_s=20, window_s=window_s)


def test_waits_over_all_arrivals() -> None:
    """TTFT 0.5, 2, 2 and 18 (to the horizon); stalls 0, 2, 15 (from 5 to the horizon), 0."""
    summary = of(EVERYBODY)
    assert summary.ttft_mean_s == pytest.approx((0.5 + 2 + 2 + 18) / 4)
    assert (summary.ttft_p50_s, summary.ttft_p99_s) == (2, 18)
    assert summary.wait_mean_s == pytest.approx((0.5 + 4 + 17 + 18) / 4)
    assert summary.wait_p99_s == 18
    assert (summary.streams, summary.whole, summary.missing) == (4, 2, 2)


def test_stalls() -> None:
    """Two seconds once, fifteen once; one of 0.2 s is in the seconds and not in the count."""
    summary = of(EVERYBODY)
    assert summary.stall_mean_s == pytest.approx((0 + 2 + 15 + 0) / 4)
    assert (summary.stall_p99_s, summary.stalls_mean) == (15, 0.5)
    short = figures(record(0.0, [0.0, 1.2]))
    assert (short.stall_s, short.stalls, short.is_stall_free) == (pytest.approx(0.2), 0, True)
    assert not figures(record(0.0, [0.0, 1.21])).is_stall_free


def test_only_whole_answers_are_stall_free_and_good() -> None:
    """What never came is not."""
    assert [figures(one).is_stall_free for one in EVERYBODY] == [True, False, False, False]
    assert of(EVERYBODY).good_share == 0.25
    assert not figures(replace(WHOLE, ttft_target_s=0.4)).is_good


def test_time_between_tokens() -> None:
    """Gaps of 0.5, 1, 1 and 3 s."""
    summary = of([WHOLE, STALLED, SILENT])
    assert summary.tbt_mean_s == pytest.approx(5.5 / 4)
    assert (summary.tbt_p50_s, summary.tbt_p99_s) == (1, 3)
    assert of([SILENT]).tbt_mean_s is None


def test_service_level_objectives() -> None:
    """A second to the first token, a second between tokens: the first keeps both, the others neither."""
    on_time, slow, late = WHOLE, record(0.0, [0.5, 2.5]), record(0.0, [3.0, 3.5])
    summary = of([on_time, slow, late, SILENT])
    shares = (summary.slo_ttft_share, summary.slo_tbt_share, summary.slo_share)
    assert shares == (2 / 4, 2 / 4, 1 / 4)


def test_throughput() -> None:
    """Six tokens from 0 to 6 s; read within the first 4 s: three, and one of the other stream."""
    summary = of([WHOLE, STALLED], window_s=4)
    assert summary.raw_tokens_per_s == pytest.approx(6 / 6)
    assert summary.consumed_tokens_per_s == pytest.approx((3 + 1) / 4)


def test_effective_throughput_and_qos() -> None:
    """Twenty tokens at once weigh 2.5 and take no time; just in time, 20 in 19 s. QoS pays for the TTFT."""
    burst, steady = record(0.0, [0.0] * 20), record(0.0, [float(at) for at in range(20)])
    both = of([burst, steady])
    assert both.effective_tokens_per_s == pytest.approx((2.5 + 20) / 19)
    assert both.qos == pytest.approx((2.5 + 20 - 0) / 19)
    late = of([record(0.0, [float(at) for at in range(5, 25)])])
    assert late.qos == pytest.approx((20 - 5) / 24)


def test_holding_text_back_raises_the_paper_s_figure_and_not_the_capped_one() -> None:
    """The same stream, as fast as the engine can and at the reader's pace (the negative control)."""
    fast = of([record(0.0, [0.1 * at for at in range(40)])])
    slow = of([record(0.0, [float(at) for at in range(40)])])
    per_answer = (
        slow.effective_tokens_per_s * slow.makespan_s / (fast.effective_tokens_per_s * fast.makespan_s)
    )
    assert per_answer > 5
    assert fast.effective_capped_tokens_per_s > slow.effective_capped_tokens_per_s
    assert fast.effective_capped_tokens_per_s == pytest.approx(40 / 36)


def test_quality_of_experience_counts_what_never_came() -> None:
    """Nothing came: 0. One of nine came, at its time, and the rest is read at the horizon."""
    assert figures(SILENT).qoe == 0
    assert figures(WHOLE).qoe == 1
    expected = [2.0 + 1.0 + number for number in range(1, 10)]
    late = sum(20 - at for at in expected[1:]) + (5.0 - expected[0])
    whole = sum(20 - at for at in expected)
    assert figures(CUT_OFF).qoe == pytest.approx(1 - late / whole)


def test_leads() -> None:
    """Unread 1, 2, 2, 2 as the tokens of the first come (at 1.0 the one of 0.5 is not read yet)."""
    assert figures(WHOLE).lead_s == pytest.approx((1 + 2 + 2 + 2) / 4)


def test_machines_count_for_throughput_only() -> None:
    with_machine = of([WHOLE, MACHINE])
    assert with_machine.wait_mean_s == 0.5
    assert with_machine.raw_tokens_per_s == pytest.approx(6 / 8)
    assert of([MACHINE]).ttft_mean_s == 1.0, "with machines only, they are shown"


def test_classes() -> None:
    """Of two classes one is served, the other is not: (1 + q)^2 / (2 (1 + q^2)) of their mean QoE."""
    served = replace(WHOLE, sla="premium")
    summary = of([served, replace(STALLED, sla="economy"), replace(SILENT, sla="economy")])
    assert (summary.worst_class, summary.worst_class_good_share) == ("economy", 0.0)
    premium, economy = summary.classes["premium"], summary.classes["economy"]
    assert (premium.streams, premium.good_share, premium.ttft_mean_s, premium.qoe_mean) == (1, 1.0, 0.5, 1.0)
    assert (economy.streams, economy.wait_mean_s, economy.wait_p99_s) == (2, (4 + 18) / 2, 18)
    other = economy.qoe_mean
    assert summary.fairness == pytest.approx((1 + other) ** 2 / (2 * (1 + other**2)))
    assert of([served, replace(WHOLE, sla="economy")]).fairness == pytest.approx(1.0)


def test_no_requests_are_no_run() -> None:
    with pytest.raises(ValueError, match="no requests"):
        of([])
