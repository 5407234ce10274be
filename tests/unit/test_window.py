"""The sliding window of a minute."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tokenflow_gateway.tenants.window import SLOT_S, SLOTS, SlidingWindow


def admitted(times: list[float], limit: int, amount: int = 1) -> list[float]:
    """Of requests at these times, those that there is room for."""
    window, let_in = SlidingWindow(), []
    for now in times:
        if window.room_in_s(amount, limit, now) == 0:
            window.add(amount, now)
            let_in.append(now)
    return let_in


@given(
    st.lists(st.floats(0, 300), max_size=120).map(sorted),
    st.integers(1, 20),
    st.floats(0, 1e9),
)
def test_no_minute_has_more_than_the_limit(times: list[float], limit: int, start: float) -> None:
    let_in = admitted([start + time for time in times], limit)
    for first in let_in:
        assert sum(first <= other < first + 60 for other in let_in) <= limit


def test_a_steady_load_gets_98_percent_of_the_limit() -> None:
    times = [step / 100 for step in range(600 * 100)]  # ten minutes, 6000 a minute
    let_in = admitted(times, limit=600)
    assert 0.98 * 6000 <= len(let_in) <= 6000


def test_room_comes_when_it_is_promised_and_not_before() -> None:
    window = SlidingWindow()
    for second in range(10):
        window.add(1, 100.0 + second)
    wait_s = window.room_in_s(3, 10, 110.0)
    assert window.room_in_s(3, 10, 110.0 + wait_s - SLOT_S) > 0
    assert window.room_in_s(3, 10, 110.0 + wait_s) == 0


def test_more_than_the_limit_never_has_room() -> None:
    assert SlidingWindow().room_in_s(11, 10, 0.0) == math.inf


def test_what_was_not_used_is_free_again_at_once() -> None:
    window = SlidingWindow()
    slot = window.add(100, 10.0)
    window.change(slot, -70, None, 11.0)
    assert window.used(11.0) == 30
    window.change(slot, -70, None, 11.0)  # never below nothing
    assert window.used(11.0) == 0


def test_what_was_used_beyond_the_estimate_counts_from_then_on() -> None:
    window = SlidingWindow()
    slot = window.add(100, 10.0)
    window.change(slot, 50, 1000, 50.0)
    assert window.used(50.0) == 150
    assert window.used(80.0) == 50


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    window = SlidingWindow()
    window.add(1, 100.0)
    window.add(1, 90.0)
    assert window.used(90.0) == 2
    assert window.used(161.0) == 0


# ---- what is used beyond the limit ----------------------------------------------------------------------

MINUTE_S = SLOTS * SLOT_S


def test_a_debt_of_ten_minutes_is_paid_by_ten_minutes() -> None:
    """Once a minute the tenant asks for one token more; the limit is 100, and 1,000 were used at once."""
    window = SlidingWindow()
    slot = window.add(10, 0.0)
    window.change(slot, 990, 100, 0.0)
    for minute in range(9):
        assert window.used(minute * MINUTE_S) == 1000 - 100 * minute
        assert window.room_in_s(1, 100, minute * MINUTE_S) > 0
    assert window.room_in_s(1, 100, 10 * MINUTE_S) == 0


def test_without_a_limit_nothing_is_owed() -> None:
    """The negative control: all that was used counts for its minute, and no longer."""
    window = SlidingWindow()
    window.change(window.add(10, 0.0), 990, None, 0.0)
    assert window.used(MINUTE_S - SLOT_S) == 1000
    assert window.used(MINUTE_S) == 0


def test_what_is_given_back_pays_debts_first() -> None:
    window = SlidingWindow()
    first, second = window.add(50, 0.0), window.add(50, 10.0)
    window.change(first, 30, 100, 20.0)
    window.change(second, -40, 100, 20.0)
    assert window.used(20.0) == 90
    assert window.used(MINUTE_S) == 40  # what is left of the second, and of the debt nothing
    assert window.used(MINUTE_S + 10.0) == 0


AMOUNTS = st.tuples(st.floats(0, 90), st.integers(0, 30), st.integers(-30, 300))


@given(st.lists(AMOUNTS, min_size=1, max_size=8), st.integers(1, 40), st.floats(0, 2000))
def test_a_debt_is_paid_in_time_whoever_looks(
    uses: list[tuple[float, int, int]], limit: int, then_s: float
) -> None:
    """One window is looked at in each slot, the other only when something is used."""
    looked_at, left_alone = SlidingWindow(), SlidingWindow()
    now = 0.0
    for pause_s, amount, change in uses:
        for step in range(math.ceil(pause_s / SLOT_S)):
            looked_at.used(now + step * SLOT_S)
        now += pause_s
        for window in (looked_at, left_alone):
            window.change(window.add(amount, now), change, limit, now)
        assert looked_at.used(now) == left_alone.used(now)
    for step in range(math.ceil(then_s / SLOT_S)):
        looked_at.used(now + step * SLOT_S)
    assert looked_at.used(now + then_s) == left_alone.used(now + then_s)


@given(st.lists(AMOUNTS, min_size=1, max_size=8), st.integers(1, 40), st.integers(1, 40))
def test_room_comes_when_it_is_promised_behind_debts_too(
    uses: list[tuple[float, int, int]], limit: int, wanted: int
) -> None:
    window, now = SlidingWindow(), 0.0
    for pause_s, amount, change in uses:
        now += pause_s
        window.change(window.add(amount, now), change, limit, now)
    empty_s, wait_s = window.told(now)[1], window.room_in_s(wanted, limit, now)
    if 0 < wait_s < math.inf:
        assert window.room_in_s(wanted, limit, now + wait_s - SLOT_S) > 0
        assert window.room_in_s(wanted, limit, now + wait_s + 1e-6) == 0
    assert window.used(now + empty_s + 1e-6) == 0


@given(st.integers(1, 50), st.integers(1, 2000), st.floats(0, 59))
def test_no_time_has_more_than_its_minutes_allow(limit: int, beyond: int, ended_s: float) -> None:
    """A tenant that takes whatever it gets: its one stream used `beyond` more than all that it may."""
    window = SlidingWindow()
    slot = window.add(limit, 0.0)
    window.change(slot, beyond, limit, ended_s)
    used, now = limit + beyond, ended_s
    for _ in range(30):
        now += window.room_in_s(1, limit, now) + 1e-6
        room = limit - window.used(now)
        window.add(room, now)
        used += room
        assert used <= limit * (now // MINUTE_S + 1) + 1e-6
