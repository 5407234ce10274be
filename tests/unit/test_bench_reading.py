"""A simulated person: when each token is read, and when there was nothing to read. All cases by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_bench.people import Scanning
from tokenflow_bench.reading import Person, Reading, Span, read_times, waits


def read(person: Person, token_s: Sequence[float]) -> list[float]:
    return read_times(person, token_s).tolist()


def stalls(person: Person, token_s: Sequence[float], *, until_s: float | None = None) -> list[Span]:
    return waits(person, token_s, read_times(person, token_s), until_s=until_s)


def alive(person: Person, token_s: Sequence[float]) -> list[float]:
    """The same, token by token."""
    reading = Reading(person)
    for at in token_s:
        reading.arrived(at)
    return reading.read_s


def test_reads_at_its_rate_while_there_is_text() -> None:
    """Four tokens at once, two a second: the first is read half a second after it came."""
    assert read(Person(2.0), [1.0, 1.0, 1.0, 1.0]) == [1.5, 2.0, 2.5, 3.0]
    assert stalls(Person(2.0), [1.0, 1.0, 1.0, 1.0]) == []


def test_waits_for_text_that_is_late() -> None:
    """Read up at 1.5, and the second comes at 2.5: a stall of one second, and reading goes on."""
    assert read(Person(2.0), [1.0, 2.5, 2.6]) == [1.5, 3.0, 3.5]
    assert stalls(Person(2.0), [1.0, 2.5, 2.6]) == [(1.5, 2.5)]


def test_waits_for_text_that_never_comes() -> None:
    assert stalls(Person(2.0), [1.0], until_s=4.0) == [(1.5, 4.0)]
    assert stalls(Person(2.0), [1.0], until_s=1.2) == []
    assert stalls(Person(2.0), [], until_s=4.0) == []


def test_pause_holds_reading_up_in_the_middle_of_a_token() -> None:
    """One token a second, a pause from 0.5 to 2.5 s after the first: its other half is read afterwards."""
    assert read(Person.with_pauses(1.0, [(0.5, 2.5)]), [10.0, 10.0]) == [13.0, 14.0]


def test_who_pauses_does_not_wait() -> None:
    """Read up at 11, paused from 11.5 to 13, the next token at 14: stalls of half a second and one."""
    person = Person.with_pauses(1.0, [(1.5, 3.0)])
    assert stalls(person, [10.0, 14.0]) == [(11.0, 11.5), (13.0, 14.0)]
    assert read(person, [10.0, 14.0]) == [11.0, 15.0]


def test_a_token_read_when_a_pause_begins_was_read_before_it() -> None:
    """The earliest time, not the end of the pause."""
    assert read(Person.with_pauses(1.0, [(1.0, 4.0)]), [10.0, 10.0]) == [11.0, 15.0]


def test_text_that_comes_in_a_pause_is_read_after_it() -> None:
    person = Person.with_pauses(1.0, [(1.0, 4.0)])
    assert stalls(person, [10.0, 12.0]) == []
    assert read(person, [10.0, 12.0]) == [11.0, 15.0]


def test_scans_faster() -> None:
    """Two seconds at three times the pace of one a second, then one a second."""
    assert read(Person(1.0, ((2.0, 3.0),)), [0.0] * 7) == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2, 3])


def test_machine_takes_all_and_never_stalls() -> None:
    machine = Person(math.inf)
    assert read(machine, [1.0, 5.0, 5.0]) == alive(machine, [1.0, 5.0, 5.0]) == [1.0, 5.0, 5.0]
    assert stalls(machine, [1.0, 5.0], until_s=9.0) == []


def test_position_is_what_has_been_read() -> None:
    reading = Reading(Person(2.0))
    for at in (1.0, 1.0, 1.0):
        reading.arrived(at)
    assert [reading.read_by(at) for at in (0.0, 1.4, 1.5, 2.2, 99.0)] == [0, 0, 1, 2, 3]


def test_pauses_and_changes_are_where_they_were_put() -> None:
    assert Person.with_pauses(5.0, [(3.0, 13.0), (20.0, 21.0)]).pauses() == [(3.0, 13.0), (20.0, 21.0)]
    scans_and_pauses = Person(5.0, ((3.0, 1.0), (2.0, 3.0), (4.0, 0.0)))
    assert list(scans_and_pauses.changes()) == [(0, 1), (3, 3), (5, 0), (9, 1)]
    assert list(Person(5.0).changes()) == []


cases = given(
    gaps=st.lists(st.floats(0, 3), min_size=1, max_size=60),
    rate=st.floats(0.5, 50),
    seed=st.integers(0, 1000),
)


def _came(gaps: Sequence[float]) -> list[float]:
    return np.cumsum(gaps).tolist()  # type: ignore[no-any-return]


def _scanning(rate: float, seed: int, *, factor: float = 3.0) -> Person:
    scanning = Scanning(read_s=3.0, scan_s=1.0, pause_s=2.0, factor=factor)
    return Person(rate, scanning.spans(np.random.default_rng(seed), until_s=100.0))


@cases
def test_one_by_one_and_all_at_once_are_the_same(gaps: list[float], rate: float, seed: int) -> None:
    person, came = _scanning(rate, seed), _came(gaps)
    assert read(person, came) == pytest.approx(alive(person, came), abs=1e-6)
    assert read(Person(rate), came) == pytest.approx(alive(Person(rate), came), abs=1e-6)


@cases
def test_time_is_reading_stalling_or_pausing(gaps: list[float], rate: float, seed: int) -> None:
    """Every moment from the first token to the last one read is one of the three."""
    person, came = _scanning(rate, seed, factor=1.0), _came(gaps)
    first, end = came[0], read(person, came)[-1]
    stalled = sum(stop - start for start, stop in stalls(person, came))
    paused = sum(
        max(min(first + stop, end) - min(first + start, end), 0.0) for start, stop in person.pauses()
    )
    assert end - first == pytest.approx(len(gaps) / rate + stalled + paused, abs=1e-6)


@cases
def test_a_simulation_in_small_steps_reads_alike(gaps: list[float], rate: float, seed: int) -> None:
    """What is read flows at rate times factor while there is text: at j tokens just when token j is read."""
    person, came = _scanning(rate, seed), _came(gaps)
    edges = {came[0] + at: factor for at, factor in person.changes()}
    read_s = read(person, came)
    consumed, factor, generated, at = 0.0, 1.0, 0, came[0]
    for until in sorted({*came, *edges, *read_s}):
        consumed += min(rate * factor * (until - at), generated - consumed)
        at, factor = until, edges.get(until, factor)
        generated = sum(one <= until for one in came)
        if until in read_s:
            assert consumed == pytest.approx(sum(one <= until for one in read_s), abs=1e-5)
    assert consumed == pytest.approx(len(came), abs=1e-5)
