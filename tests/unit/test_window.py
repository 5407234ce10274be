"""The sliding window of a minute."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tokenflow_gateway.tenants.window import SLOT_S, SlidingWindow


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
    window.change(slot, -70, 11.0)
    assert window.used(11.0) == 30
    window.change(slot, -70, 11.0)  # never below nothing
    assert window.used(11.0) == 0


def test_what_was_used_beyond_the_estimate_counts_from_then_on() -> None:
    window = SlidingWindow()
    slot = window.add(100, 10.0)
    window.change(slot, 50, 50.0)
    assert window.used(50.0) == 150
    assert window.used(80.0) == 50


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    window = SlidingWindow()
    window.add(1, 100.0)
    window.add(1, 90.0)
    assert window.used(90.0) == 2
    assert window.used(161.0) == 0
