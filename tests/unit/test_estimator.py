"""The estimator of a reader's position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_gateway.readers.estimator import PAUSE_EXPIRES_S, Estimator, Pace
from tokenflow_gateway.readers.speed import TextShape, model_pace

PACE = Pace(5.0, 4.0, 6.0, "model")


def reader(*, delivered: int = 1000, kind: str = "human") -> Estimator:
    made = Estimator(PACE, reader=kind, now=0.0)  # type: ignore[arg-type]
    made.deliver([delivered], [0.0])
    return made


def test_without_evidence_it_reads_at_the_prior() -> None:
    estimate = reader().estimate(2.0)
    assert (estimate.consumed, estimate.rate, estimate.rate_low, estimate.rate_high) == (10.0, 5.0, 4.0, 6.0)
    assert (estimate.state, estimate.source) == ("reading", "model")


def test_it_waits_where_the_text_ends() -> None:
    made = reader(delivered=5)
    assert made.estimate(10.0).state == "stalled"
    made.deliver([20], [10.0])
    assert made.estimate(11.0).consumed == 10.0


def test_a_machine_has_read_everything() -> None:
    estimate = reader(kind="machine").estimate(0.0)
    assert (estimate.consumed, estimate.state) == (1000.0, "ahead")


def test_an_exact_report_is_taken_over() -> None:
    made = reader()
    made.report(at=1.0, position=7.0, rate=None, paused=False, now=1.0)
    estimate = made.estimate(1.0)
    assert (estimate.consumed, estimate.source) == (7.0, "progress")


def test_a_report_of_a_moment_ago_is_moved_on() -> None:
    made = reader()
    made.report(at=1.0, position=20.0, rate=10.0, paused=False, now=1.5)
    assert made.estimate(1.5).consumed == 25.0


def test_a_pause_holds_and_expires_without_a_sign_of_life() -> None:
    made = reader()
    made.report(at=1.0, position=5.0, rate=None, paused=True, now=1.0)
    assert made.estimate(10.0).state == "paused"
    assert made.estimate(1.0 + PAUSE_EXPIRES_S - 0.01).consumed == 5.0
    over = made.estimate(1.0 + PAUSE_EXPIRES_S + 1.0)
    assert over.state == "reading"
    assert over.consumed == pytest.approx(10.0)


def test_a_pause_that_is_confirmed_goes_on() -> None:
    made = reader()
    for at in (1.0, 10.0, 20.0, 30.0):
        made.report(at=at, position=5.0, rate=None, paused=True, now=at)
    assert made.estimate(40.0).consumed == 5.0


@pytest.mark.parametrize("new_rate", [1.0, 2.5, 10.0, 30.0])
def test_a_changed_rate_is_followed_within_two_seconds_of_evidence(new_rate: float) -> None:
    made = reader()
    for tick in range(1, 11):
        made.report(at=tick * 0.2, position=tick * 1.0, rate=None, paused=False, now=tick * 0.2)
    assert made.estimate(2.0).rate == pytest.approx(5.0)
    for tick in range(1, 11):
        at = 2.0 + tick * 0.2
        made.report(at=at, position=10.0 + tick * 0.2 * new_rate, rate=None, paused=False, now=at)
    assert made.estimate(4.0).rate == pytest.approx(new_rate, rel=0.2)


def test_waiting_for_text_is_not_slow_reading() -> None:
    made = Estimator(PACE, reader="human", now=0.0)
    for tick in range(1, 20):
        made.deliver([tick], [float(tick)])
        made.report(at=tick + 0.5, position=float(tick), rate=None, paused=False, now=tick + 0.5)
    assert made.estimate(20.0).rate == pytest.approx(5.0)


def test_the_band_is_the_priors_first_and_the_readers_later() -> None:
    made = reader()
    for tick in range(1, 50):
        made.report(at=tick * 0.2, position=tick * 2.0, rate=None, paused=False, now=tick * 0.2)
    estimate = made.estimate(10.0)
    assert estimate.rate == pytest.approx(10.0, rel=0.01)
    assert 9.0 < estimate.rate_low <= estimate.rate <= estimate.rate_high < 11.0


def say(
    made: Estimator, position: float | None, *, now: float, rate: float | None = None, paused: bool = False
) -> None:
    made.report(at=now, position=position, rate=rate, paused=paused, now=now)


def test_positions_rule_over_the_rate_in_the_same_reports() -> None:
    made = reader()
    for tick in range(1, 61):
        say(made, tick * 1.0, rate=50.0, now=tick * 0.25)
    assert made.estimate(15.0).rate == pytest.approx(4.0, rel=0.05)
    assert made.estimate(16.0).consumed == pytest.approx(64.0, abs=1.0)
    tokens, seconds = made.watched
    assert tokens / seconds == pytest.approx(4.0), "only what was read was watched"


def test_a_declaration_alone_is_the_prior_and_teaches_nothing() -> None:
    made = reader()
    say(made, None, rate=12.0, now=1.0)
    made.set_pace(PACE, now=1.1)
    estimate = made.estimate(2.0)
    assert (estimate.rate, estimate.source) == (12.0, "declared")
    assert (estimate.rate_low, estimate.rate_high) == pytest.approx((10.8, 13.2))
    assert made.watched == (0.0, 0.0)


def test_better_priors_leave_the_evidence_its_name() -> None:
    made = reader()
    say(made, 4.0, now=1.0)
    made.set_pace(Pace(6.0, 5.0, 7.0, "model"), now=1.1)
    assert made.estimate(1.1).source == "progress"


def test_another_declaration_begins_anew_and_the_same_does_not() -> None:
    made = reader()
    for tick in range(1, 9):
        say(made, tick * 1.0, rate=10.0, now=tick * 0.5)
    assert made.estimate(4.0).rate == pytest.approx(2.0)
    say(made, 9.0, rate=20.0, now=4.5)
    assert made.estimate(5.0).consumed == 19.0


def test_whole_tokens_do_not_shake_a_declared_rate() -> None:
    made = reader()
    say(made, None, rate=5.3, now=0.0)
    for tick in range(1, 200):
        now = tick * 0.3
        say(made, float(int(now * 5.3)), rate=5.3, now=now)
        assert made.estimate(now).rate == pytest.approx(5.3, rel=0.05)


def test_a_pause_teaches_nothing_however_it_is_told() -> None:
    made = reader()
    for tick in range(64):
        say(made, tick * 1.0, rate=900.0, paused=True, now=tick * 1.0)
    assert made.watched == (0.0, 0.0)


def test_no_more_is_watched_than_time_and_text_allow() -> None:
    made = reader(delivered=50)
    made.estimate(0.2)
    for age_s, position in [(60.0, 0.0), (50.0, 5.0), (40.0, 10.0), (0.0, 15.0)] * 8:
        made.report(at=0.2 - age_s, position=position, rate=None, paused=False, now=0.2)
    assert made.watched[1] <= 0.2
    for tick in range(60):
        say(made, 0.0 if tick % 2 else 40.0, now=1.0 + tick)
    assert made.watched[0] <= 50
    assert made.watched[1] <= 60.0


def test_waiting_for_text_is_not_watched() -> None:
    made = Estimator(PACE, reader="human", now=0.0)
    for tick in range(1, 20):
        made.deliver([tick], [float(tick)])
        say(made, float(tick), now=tick + 0.5)
    assert made.watched == (0.0, 0.0)


def test_what_a_machine_reports_rules_for_a_while() -> None:
    made = reader(kind="machine")
    say(made, 7.0, paused=True, now=1.0)
    estimate = made.estimate(10.0)
    assert (estimate.consumed, estimate.state, estimate.source) == (7.0, "paused", "progress")
    for tick in range(5):
        say(made, 10.0 + tick * 5, now=11.0 + tick)
    assert made.estimate(15.5).consumed == pytest.approx(32.5)
    assert made.estimate(15.5).state == "ahead"
    assert made.estimate(15.0 + PAUSE_EXPIRES_S).consumed == 1000.0


def test_where_it_was_a_moment_ago() -> None:
    made = reader()
    assert made.position_at(3.0, now=4.0) == 15.0
    assert made.estimate(0.0).consumed == 20.0, "that was the time of the look"
    say(made, 21.0, paused=True, now=4.0)
    assert made.position_at(5.0, now=8.0) == 21.0


@dataclass
class Person:
    """A reader whose true position is known: changes speed and pauses, and reports truthfully."""

    position: float = 0.0

    def read(self, seconds: float, rate: float, delivered: int) -> None:
        self.position = min(float(delivered), self.position + seconds * rate)


steps = st.lists(
    st.tuples(st.floats(0.05, 0.5), st.floats(1, 20), st.integers(0, 20), st.booleans()), max_size=60
)


@given(steps)
def test_truthful_reports_are_followed_and_the_invariants_hold(
    story: list[tuple[float, float, int, bool]],
) -> None:
    made, person = Estimator(PACE, reader="human", now=0.0), Person()
    now, delivered, last = 0.0, 0, 0.0
    for seconds, rate, tokens, paused in story:
        delivered += tokens
        made.deliver([delivered], [now])
        if not paused:
            person.read(seconds, rate, delivered)
        now += seconds
        made.report(at=now, position=person.position, rate=None, paused=paused, now=now)
        estimate = made.estimate(now)
        assert last - 1e-9 <= estimate.consumed <= delivered
        assert estimate.consumed >= person.position - 1e-9, "never behind what is proven"
        assert 0 < estimate.rate_low <= estimate.rate <= estimate.rate_high
        last = estimate.consumed


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3),
            st.one_of(st.none(), st.floats(-50, 500)),
            st.one_of(st.none(), st.floats(0.001, 1000)),
            st.booleans(),
            st.floats(-5, 5),
            st.integers(0, 30),
        ),
        max_size=50,
    )
)
def test_no_report_however_wrong_breaks_the_invariants(story: list[tuple[object, ...]]) -> None:
    made = Estimator(PACE, reader="human", now=0.0)
    now, delivered, last = 0.0, 0, 0.0
    for wait_s, position, rate, paused, lag_s, tokens in story:
        now += wait_s  # type: ignore[operator]
        delivered += tokens  # type: ignore[operator]
        made.deliver([delivered], [now])
        made.report(at=now - lag_s, position=position, rate=rate, paused=paused, now=now)  # type: ignore[arg-type, operator]
        estimate = made.estimate(now)
        assert last <= estimate.consumed <= delivered
        assert 0 < estimate.rate_low <= estimate.rate <= estimate.rate_high < math.inf
        last = estimate.consumed


def test_people_read_english_at_the_published_rate() -> None:
    shape = TextShape()
    for word in ["The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", ""] * 20:
        shape.add(word + " ")
    chars_per_s = model_pace(shape, reader="human").rate * shape.chars / shape.tokens
    assert chars_per_s == pytest.approx(23.8)


def test_cjk_is_read_by_the_character() -> None:
    shape = TextShape()
    for _ in range(100):
        shape.add("巴黎")
    pace = model_pace(shape, reader="human")
    assert pace.rate == pytest.approx(6.63 / 2, rel=0.01)
    assert model_pace(shape, reader="voice").rate < pace.rate


def test_a_mixed_text_lies_between() -> None:
    latin, wide, mixed = TextShape(), TextShape(), TextShape()
    for _ in range(50):
        latin.add("ab")
        wide.add("巴黎")
        mixed.add("ab")
        mixed.add("巴黎")
    rates = [model_pace(shape, reader="human").rate for shape in (wide, mixed, latin)]
    assert rates == sorted(rates)
    assert rates[0] < rates[1] < rates[2]


def shape_of(text: str, *, cut: int) -> TextShape:
    """The text, cut into tokens of so many characters."""
    shape = TextShape()
    for start in range(0, len(text), cut):
        shape.add(text[start : start + cut])
    return shape


@pytest.mark.parametrize("cut", range(1, 8))
def test_code_is_found_however_it_is_cut(cut: int) -> None:
    code = "def f(x):\n    return x\n" * 20
    shape = shape_of(f"Like `this`:\n\n```python\n{code}```\n\nThat is ``all``, 巴黎.", cut=cut)
    assert shape.code_chars == pytest.approx(len("python\n" + code), abs=2 * cut)
    assert shape.wide_chars == 2


def test_code_without_an_end_goes_on() -> None:
    shape = shape_of("Here:\n````\n" + "x = 1\n" * 50, cut=4)
    assert shape.code_chars > 290


def test_inline_code_and_prose_are_no_code() -> None:
    assert shape_of("Use `a` or ``b`c`` and `` ` `` here. " * 20, cut=3).code_chars == 0


def test_code_is_taken_to_be_read_slower_and_less_certainly() -> None:
    prose = model_pace(shape_of("some words of prose " * 30, cut=4), reader="human")
    code = model_pace(shape_of("```\n" + "some words of code " * 30, cut=4), reader="human")
    mixed = model_pace(shape_of("words " * 80 + "```\n" + "words " * 80, cut=4), reader="human")
    assert code.rate == pytest.approx(prose.rate / 2, rel=0.02)
    assert code.rate < mixed.rate < prose.rate
    assert code.low < code.rate / 2
    assert code.high > prose.rate


def test_a_voice_reads_code_like_anything_else() -> None:
    code, prose = (shape_of(first + "some words of code " * 30, cut=4) for first in ("```\n", "---\n"))
    assert model_pace(code, reader="voice") == model_pace(prose, reader="voice")


def test_nothing_known_of_the_text_is_a_typical_text() -> None:
    assert model_pace(TextShape(), reader="human").rate == pytest.approx(5.3, abs=0.05)


def test_a_declared_rate_has_a_narrow_band() -> None:
    pace = Pace.declared(8.0)
    assert (pace.rate, pace.low, pace.high, pace.source) == (8.0, 7.2, 8.8, "declared")
