"""The figures of the accuracy table, on cases small enough to be worked out by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from tokenflow_bench.readers.accuracy.measure import Accuracy, Sample, measure, noticed_ms
from tokenflow_bench.readers.accuracy.pace import pace
from tokenflow_bench.readers.accuracy.rows import Target
from tokenflow_bench.readers.accuracy.truth import Positions, Truth, person_behind
from tokenflow_bench.readers.accuracy.verdict import CONTROL_TOKENS, RowSummary, is_bounded, verdict


def sample(at_s: float, *, generated: float = 0, consumed: float = 0, state: str = "reading") -> Sample:
    return Sample(
        at_s=at_s,
        took_s=0.002,
        generated=generated,
        consumed=consumed,
        buffered=generated - consumed,
        rate=10.0,
        state=state,
        source="progress",
    )


TRUTH = Truth(
    generated=Positions.of_events([0.0, 1.0, 2.0, 3.0]),
    consumed=Positions([(0.5, 1), (2.5, 2)]),
    window=(0.0, 10.0),
)


def test_positions_hold_until_the_next_step() -> None:
    positions = Positions([(2.0, 3.0), (1.0, 1.0)])
    assert [positions.at(at) for at in (0.5, 1.0, 1.9, 2.0, 9.0)] == [0.0, 1.0, 1.0, 3.0, 3.0]


def test_buffered_is_what_was_generated_and_not_read() -> None:
    assert [TRUTH.buffered(at) for at in (0.0, 0.5, 1.0, 2.0, 2.5, 3.0)] == [1, 0, 1, 2, 1, 2]


def test_a_person_reads_at_a_rate_what_has_come() -> None:
    """Half a second a token; the third comes late, and the person has waited for it."""
    assert person_behind([0.0, 0.1, 5.0], rate=2.0) == [0.5, 1.0, 5.5]


def test_errors_are_those_of_buffered_at_the_same_instant() -> None:
    """True: 1, 2 and 2 tokens. Shown: 1, 3 and 0: errors of 0, 1 and 2; read by then 1, 1 and 2 tokens."""
    samples = [
        sample(1.0, generated=2, consumed=1),
        sample(2.0, generated=3, consumed=0),
        sample(3.0, generated=4, consumed=4),
    ]
    figures = measure(samples, TRUTH)
    assert figures.samples == 3
    assert figures.mean_error == 1.0
    assert figures.p95_error == 2.0
    assert figures.share == 3 / 4
    assert figures.consumed_error == 1.0
    assert (figures.most_read_too_far, figures.most_read_too_short) == (2.0, 1.0)
    assert figures.tokens_read == 2.0
    assert figures.sources == {"progress": 3}


def test_what_the_gateway_lacks_is_an_error_of_buffered_only() -> None:
    """Two tokens are on their way from the engine: it shows 2 of 4 generated, and the true position."""
    figures = measure([sample(3.0, generated=2, consumed=2)], TRUTH)
    assert (figures.mean_error, figures.consumed_error) == (2.0, 0.0)


def test_only_samples_within_the_window_count() -> None:
    wrong = sample(11.0, generated=500)
    right = sample(1.0, generated=2, consumed=1)
    assert measure([right, wrong], TRUTH).mean_error == 0.0
    with pytest.raises(ValueError, match="nothing of this stream"):
        measure([wrong], TRUTH)


def test_a_pause_is_noticed_by_the_first_sample_that_shows_it() -> None:
    samples = [
        sample(0.5, state="paused"),
        sample(1.1),
        sample(1.3, state="paused"),
        sample(2.05, state="paused"),
        sample(2.1),
    ]
    assert noticed_ms(samples, 1.0, 2.0) == pytest.approx((300.0, 100.0))


def test_a_pause_never_shown_has_no_times() -> None:
    assert noticed_ms([sample(1.5), sample(2.5)], 1.0, 2.0) == (None, None)


def test_a_pause_noticed_only_after_its_end_was_not_noticed() -> None:
    assert noticed_ms([sample(1.5), sample(2.5, state="paused")], 1.0, 2.0) == (None, None)


def test_a_pause_whose_end_is_not_seen() -> None:
    assert noticed_ms([sample(0.5), sample(1.5, state="paused")], 1.0, 2.0) == (pytest.approx(500.0), None)


def test_a_pause_shown_all_the_time_was_not_noticed() -> None:
    samples = [sample(at, state="paused") for at in (0.5, 1.1, 1.5)]
    assert noticed_ms([*samples, sample(2.1)], 1.0, 2.0) == (None, None)


def test_the_worst_of_several_pauses_counts() -> None:
    truth = replace(TRUTH, pauses=[(1.0, 2.0), (3.0, 4.0)])
    seen = [sample(0.9), sample(1.1, state="paused"), sample(2.1), sample(3.4, state="paused"), sample(4.2)]
    figures = measure(seen, truth)
    assert (figures.pauses, figures.pause_noticed_ms) == (2, pytest.approx(400.0))
    assert figures.resume_noticed_ms == pytest.approx(200.0)
    missed = measure([*seen[:3], sample(3.4), sample(4.2)], truth)
    assert missed.pause_noticed_ms is None, "one of the two was not noticed"


def test_a_pause_shown_while_the_reader_reads_is_made_up() -> None:
    """Within a pause, or two seconds after it, it is not."""
    truth = replace(TRUTH, pauses=[(1.0, 2.0)])
    samples = [sample(at, state="paused") for at in (0.5, 1.5, 3.5, 4.5)]
    assert measure(samples, truth).false_pauses == 2 / 4


def test_hidden_is_the_most_that_lay_unread_in_the_window() -> None:
    truth = replace(
        TRUTH,
        unread_bytes=[(1.0, 500), (2.0, 1500), (11.0, 9000)],
        bytes_per_token=300.0,
        receive_buffer_bytes=4096,
    )
    figures = measure([sample(1.0)], truth)
    assert (figures.hidden_bytes, figures.hidden_tokens, figures.receive_buffer_bytes) == (1500, 5.0, 4096)


def test_a_reader_takes_tokens_at_its_rate_and_none_in_a_pause() -> None:
    now = 0.0
    paused = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def pause(seconds: float) -> None:
        paused.append((now, seconds))
        sleep(seconds)

    steps = pace([(1.0, 4.0), (2.0, 0.0), (1.0, 2.0)], pause=pause, clock=lambda: now, sleep=sleep)
    assert [now for _ in steps] == [0.25, 0.5, 0.75, 3.5]
    assert paused == [(1.0, 2.0)]
    assert now == 4.0


# ---- what was promised ----


def outcome(**figures: Any) -> dict[str, Any]:
    plain = Accuracy(
        samples=100,
        mean_error=0.5,
        p95_error=1.0,
        share=0.01,
        consumed_error=0.5,
        most_read_too_far=1.0,
        most_read_too_short=1.0,
        pauses=1,
        pause_noticed_ms=100.0,
        resume_noticed_ms=100.0,
        false_pauses=0.0,
        tokens_read=200.0,
        hidden_bytes=3000,
        hidden_tokens=10.0,
        receive_buffer_bytes=8192,
        sources={"progress": 90, "model": 10},
    )
    return asdict(replace(plain, **figures))


def judged(target: Target, *runs: dict[str, Any]) -> str:
    row = {"name": "r", "words": "a reader", "target": asdict(target), "repetitions": runs}
    return verdict(RowSummary.of(row))


REPORTS = Target(words="", mean_tokens=1.0, pause_ms=200.0)


def test_the_median_of_the_repetitions_counts() -> None:
    assert judged(REPORTS, outcome(), outcome(mean_error=9.0), outcome(mean_error=1.0)) == "met"
    assert judged(REPORTS, outcome(), outcome(mean_error=9.0), outcome(mean_error=1.1)) == "missed"


def test_every_pause_must_be_noticed_and_the_median_in_time() -> None:
    assert judged(REPORTS, outcome(pause_noticed_ms=201.0)) == "missed"
    assert judged(REPORTS, outcome(), outcome(), outcome(pause_noticed_ms=None)) == "missed"
    assert judged(REPORTS, outcome(pauses=0, pause_noticed_ms=None)) == "met"


def test_a_share_of_what_was_read() -> None:
    target = Target(words="", mean_share=0.02)
    assert judged(target, outcome(mean_error=50.0)) == "met"
    assert judged(target, outcome(share=0.021)) == "missed"


@pytest.mark.parametrize(
    ("figures", "bounded"),
    [
        ({"most_read_too_far": 11.0}, True),
        ({"most_read_too_far": 11.1}, False),
        ({"most_read_too_short": 11.1}, False),
        ({"hidden_bytes": 8193}, False),
        ({"hidden_tokens": None}, False),
    ],
)
def test_an_error_may_be_what_the_kernel_hides_and_one_token(figures: dict[str, Any], bounded: bool) -> None:
    assert is_bounded(outcome(**figures)) is bounded
    assert judged(Target(words="", is_bounded=True), outcome(**figures)) == ("met" if bounded else "missed")


def test_a_reader_that_lies_must_stand_out() -> None:
    control = Target(words="", is_control=True)
    assert judged(control, outcome(mean_error=CONTROL_TOKENS + 1)) == "met"
    assert judged(control, outcome(mean_error=0.5)) == "missed"


def test_nothing_promised_is_not_judged() -> None:
    assert judged(Target(words=""), outcome(mean_error=50.0)) == "-"


def test_evidence_is_named_in_the_order_of_its_use() -> None:
    runs = [outcome(), outcome(sources={"model": 60, "progress": 38, "transport": 2})]
    row = {"name": "r", "words": "", "target": asdict(REPORTS), "repetitions": runs}
    assert RowSummary.of(row).source == "progress, model"
