"""What is learned of readers from one stream to the next."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_gateway.readers.learned import HALF_LIFE_S, MAX_RATIO, Habit, LearnedRates
from tokenflow_gateway.readers.speed import TextShape, learned_pace, model_pace

AVERAGE = Habit(1.0, 175 / 238, 300 / 238)


def rates(**options: int) -> LearnedRates:
    return LearnedRates(key=b"key", **options)


def known(*ratios: float, seconds: float = 30.0, now: float = 0.0) -> Habit:
    """The habit of a reader seen to read like this."""
    learned = rates()
    for ratio in ratios:
        learned.learn(b"reader", ratio=ratio, seconds=seconds, now=0.0)
    habit = learned.habit(b"reader", now=now)
    assert habit is not None
    return habit


def width(habit: Habit) -> float:
    return math.log(habit.high / habit.low)


def test_nobody_is_known_at_first() -> None:
    assert rates().habit(b"reader", now=0.0) is None


def test_a_reader_seen_once_is_known_better_than_all_readers() -> None:
    habit = known(1.5)
    assert 1.3 < habit.ratio < 1.5
    assert width(habit) < 0.6 * width(AVERAGE)


def test_more_texts_bring_the_ratio_closer_and_the_band_narrower() -> None:
    habits = [known(*[1.5] * count) for count in (1, 3, 10)]
    assert [habit.ratio for habit in habits] == sorted(habit.ratio for habit in habits)
    assert [width(habit) for habit in habits] == sorted((width(habit) for habit in habits), reverse=True)
    assert habits[-1].ratio == pytest.approx(1.5, rel=0.02)


def test_a_short_look_counts_less_than_a_whole_text() -> None:
    assert 1.0 < known(1.5, seconds=5.0).ratio < known(1.5, seconds=30.0).ratio


def test_a_reader_who_varies_has_a_wider_band() -> None:
    assert width(known(0.7, 1.4, 0.7, 1.4)) > 1.5 * width(known(1.0, 1.0, 1.0, 1.0))


def test_old_evidence_fades_to_the_average_reader() -> None:
    habits = [known(1.5, now=age * HALF_LIFE_S) for age in (0, 1, 2, 4)]
    assert [habit.ratio for habit in habits] == sorted((habit.ratio for habit in habits), reverse=True)
    assert [width(habit) for habit in habits] == sorted(width(habit) for habit in habits)
    learned = rates()
    learned.learn(b"reader", ratio=1.5, seconds=30.0, now=0.0)
    assert learned.habit(b"reader", now=6 * HALF_LIFE_S) is None
    assert len(learned) == 0


def test_a_reader_who_changes_is_followed() -> None:
    assert known(*[2.0] * 200, *[0.8] * 20).ratio < 1.3
    assert known(*[2.0] * 200, *[0.8] * 40).ratio < 1.0


def test_a_clock_that_goes_back_makes_nothing_younger() -> None:
    learned = rates()
    learned.learn(b"reader", ratio=1.5, seconds=30.0, now=HALF_LIFE_S)
    before = learned.habit(b"reader", now=HALF_LIFE_S)
    assert learned.habit(b"reader", now=0.0) == before


def test_the_reader_not_seen_for_longest_is_forgotten() -> None:
    learned = rates(capacity=2)
    for name in (b"a", b"b"):
        learned.learn(name, ratio=1.5, seconds=30.0, now=0.0)
    assert learned.habit(b"a", now=1.0) is not None
    learned.learn(b"c", ratio=1.5, seconds=30.0, now=2.0)
    assert len(learned) == 2
    assert learned.habit(b"b", now=3.0) is None
    assert learned.habit(b"a", now=3.0) is not None


def test_names_tell_users_tenants_and_kinds_of_reading_apart() -> None:
    learned = rates()
    names = {
        learned.name(tenant=tenant, user=user, reader=reader)
        for tenant, user, reader in [
            ("t", "ann", "human"),
            ("t", "bob", "human"),
            ("u", "ann", "human"),
            ("t", "ann", "voice"),
            ("ta", "nn", "human"),
        ]
    }
    assert len(names) == 5


def test_a_name_says_nothing_of_its_user_without_the_key() -> None:
    name = rates().name(tenant="t", user="ann", reader="human")
    assert name == rates().name(tenant="t", user="ann", reader="human")
    assert name != LearnedRates(key=b"other").name(tenant="t", user="ann", reader="human")
    assert b"ann" not in name
    assert len(name) == 16


@given(
    st.lists(
        st.tuples(st.floats(1e-6, 1e6), st.floats(0, 3600), st.floats(-100, 400 * 86_400)),
        min_size=1,
        max_size=40,
    )
)
def test_whatever_is_seen_stays_within_sane_bounds(story: list[tuple[float, float, float]]) -> None:
    learned, now = rates(), 0.0
    for ratio, seconds, passed_s in story:
        now += passed_s
        learned.learn(b"reader", ratio=ratio, seconds=seconds, now=now)
        habit = learned.habit(b"reader", now=now)
        if habit is not None:
            assert 1 / MAX_RATIO <= habit.ratio <= MAX_RATIO
            assert 0 < habit.low < habit.ratio < habit.high < math.inf
            assert width(habit) > 0.18, "never more certain than one reader is from text to text"


def test_a_habit_of_an_average_reader_is_the_model() -> None:
    average = model_pace(TextShape(), reader="human")
    pace = learned_pace(average, AVERAGE)
    assert (pace.rate, pace.low, pace.high) == pytest.approx((average.rate, average.low, average.high))
    assert pace.source == "learned"


def test_a_habit_holds_for_any_script() -> None:
    wide = TextShape()
    wide.add("巴黎" * 50, tokens=50)
    for shape in (TextShape(), wide):
        average = model_pace(shape, reader="human")
        pace = learned_pace(average, known(1.5))
        assert pace.rate / average.rate == pytest.approx(known(1.5).ratio)
        assert pace.high / pace.low < average.high / average.low


def test_code_stays_uncertain_however_well_its_reader_is_known() -> None:
    code = TextShape()
    code.add("```")
    code.add("return x" * 100, tokens=200)
    pace = learned_pace(model_pace(code, reader="human"), known(*[1.5] * 10))
    assert pace.high / pace.low > 4.0


def test_the_band_holds_four_times_in_five_and_one_text_halves_the_error() -> None:
    """Readers as published: 88.5 % of the variance is between them."""
    people, chance = 2000, random.Random(1)  # noqa: S311 - a simulation
    spread = math.log(300 / 175) / 2 / 1.28
    between, within = math.sqrt(0.885) * spread, math.sqrt(0.115) * spread
    error = unknown_error = 0.0
    held = 0
    for _ in range(people):
        pace = chance.gauss(0.0, between)
        habit = known(math.exp(chance.gauss(pace, within)))
        next_text = chance.gauss(pace, within)
        held += math.log(habit.low) <= next_text <= math.log(habit.high)
        error += abs(math.log(habit.ratio) - next_text)
        unknown_error += abs(next_text)
    assert held / people == pytest.approx(0.8, abs=0.03)
    assert error < 0.5 * unknown_error
