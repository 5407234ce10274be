"""Pauses, waits and tokens read, counted from looks at a reader."""

from __future__ import annotations

import pytest

from tokenflow_gateway.readers.estimator import ReaderState
from tokenflow_gateway.readers.tally import ReaderTally

SWEEP_S = 0.25


def totals(*states: ReaderState, waiting: bool = True) -> tuple[int, int, float]:
    """Pauses, stalls and stalled seconds of a reader looked at in these states, a sweep apart."""
    tally = ReaderTally(now=0.0)
    looks = [
        tally.look(state, 0.0, waiting=waiting, now=(index + 1) * SWEEP_S)
        for index, state in enumerate(states)
    ]
    return (
        sum(look.pauses for look in looks),
        sum(look.stalls for look in looks),
        sum(look.stall_s for look in looks),
    )


def test_a_pause_counts_once_however_long() -> None:
    assert totals("reading", "paused", "paused", "reading", "paused")[0] == 2


def test_a_wait_counts_once_and_its_seconds_add_up() -> None:
    pauses, stalls, seconds = totals("reading", "stalled", "stalled", "stalled", "reading", "reading")
    assert (pauses, stalls) == (0, 1)
    assert seconds == pytest.approx(3 * SWEEP_S)


def test_waiting_for_the_first_token_is_no_stall() -> None:
    assert totals("stalled", "stalled", "stalled", waiting=False) == (0, 0, 0.0)


def test_a_reader_ahead_never_waits() -> None:
    assert totals("ahead", "ahead") == (0, 0, 0.0)


def test_the_end_of_an_answer_ends_a_wait() -> None:
    tally = ReaderTally(now=0.0)
    tally.look("stalled", 5.0, waiting=True, now=1.0)
    last = tally.look("stalled", 5.0, waiting=False, now=2.0)
    assert (last.stalls, last.stall_s) == (0, 0.5)
    assert tally.look("stalled", 5.0, waiting=False, now=300.0).stall_s == 0.0


def test_tokens_are_counted_once() -> None:
    tally = ReaderTally(now=0.0)
    consumed = [
        tally.look("reading", position, waiting=True, now=1.0).consumed for position in (3.0, 3.0, 2.0, 7.5)
    ]
    assert consumed == [3.0, 0.0, 0.0, 4.5]
