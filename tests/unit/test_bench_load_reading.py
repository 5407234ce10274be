"""A simulated person: when each token is read, and when there was nothing to read. All cases by hand."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_bench.load.asks import scanning
from tokenflow_bench.load.reading import Person, Reading


def test_reads_at_its_rate_while_there_is_text() -> None:
    """Four tokens at once, two a second: the first is read half a second after it came."""
    reading = Reading.of(Person(2.0), [1.0, 1.0, 1.0, 1.0])
    assert reading.read_s == [1.5, 2.0, 2.5, 3.0]
    assert reading.stalls == []


def test_waits_for_text_that_is_late() -> None:
    """Read up at 1.5, and the second comes at 2.5: a stall of one second, and reading goes on."""
    reading = Reading.of(Person(2.0), [1.0, 2.5, 2.6])
    assert reading.read_s == [1.5, 3.0, 3.5]
    assert reading.stalls == [(1.5, 2.5)]


def test_pause_holds_reading_up_in_the_middle_of_a_token() -> None:
    """One token a second, a pause from 0.5 to 2.5 s after the first: its other half is read afterwards."""
    reading = Reading.of(Person.with_pauses(1.0, [(0.5, 2.5)]), [10.0, 10.0])
    assert reading.read_s == [13.0, 14.0]


def test_who_pauses_does_not_wait() -> None:
    """Read up at 11, paused from 11.5 to 13, the next token at 14: stalls of half a second and one."""
    reading = Reading.of(Person.with_pauses(1.0, [(1.5, 3.0)]), [10.0, 14.0])
    assert reading.stalls == [(11.0, 11.5), (13.0, 14.0)]
    assert reading.read_s == [11.0, 15.0]


def test_text_that_comes_in_a_pause_is_read_after_it() -> None:
    reading = Reading.of(Person.with_pauses(1.0, [(1.0, 4.0)]), [10.0, 12.0])
    assert reading.stalls == []
    assert reading.read_s == [11.0, 15.0]


def test_scans_faster() -> None:
    """Two seconds at three times the pace of one a second, then one a second."""
    reading = Reading.of(Person(1.0, ((2.0, 3.0),)), [0.0] * 7)
    assert reading.read_s == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2, 3])


def test_machine_takes_all_and_never_stalls() -> None:
    reading = Reading.of(Person(math.inf), [1.0, 5.0, 5.0])
    assert reading.read_s == [1.0, 5.0, 5.0]
    assert reading.stalls == []
    assert reading.waiting(5.0, 9.0) == []


def test_position_is_what_has_been_read() -> None:
    reading = Reading.of(Person(2.0), [1.0, 1.0, 1.0])
    assert [reading.read_by(at) for at in (0.0, 1.4, 1.5, 2.2, 99.0)] == [0, 0, 1, 2, 3]


def test_pauses_are_where_they_were_put() -> None:
    assert Person.with_pauses(5.0, [(3.0, 13.0), (20.0, 21.0)]).pauses() == [(3.0, 13.0), (20.0, 21.0)]


@given(
    gaps=st.lists(st.floats(0, 3), min_size=1, max_size=30),
    rate=st.floats(0.5, 50),
    seed=st.integers(0, 1000),
)
def test_time_is_reading_stalling_or_pausing(gaps: list[float], rate: float, seed: int) -> None:
    """Every moment from the first token to the last one read is one of the three."""
    person = scanning(rate, random.Random(seed), factor=1.0)  # noqa: S311
    at, token_s = 0.0, []
    for gap in gaps:
        at += gap
        token_s.append(at)
    reading = Reading.of(person, token_s)
    end = reading.read_s[-1]
    stalled = sum(stop - start for start, stop in reading.stalls)
    first = token_s[0]
    paused = sum(
        max(min(first + stop, end) - min(first + start, end), 0.0) for start, stop in person.pauses()
    )
    assert end - first == pytest.approx(len(gaps) / rate + stalled + paused, abs=1e-6)
