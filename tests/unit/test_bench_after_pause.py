"""What readers met after a pause, by hand: one token a second, paused from 2 to 12, the first token at 0."""

from __future__ import annotations

import numpy as np
import pytest

from tokenflow_bench.after_pause import after_pauses, summarise_pauses
from tokenflow_bench.metrics import Record
from tokenflow_bench.reading import Person

PAUSING = Person.with_pauses(1.0, [(2.0, 12.0)])


def record(*token_s: float, is_whole: bool = True, person: Person = PAUSING) -> Record:
    return Record(due_s=0.0, token_s=np.array(token_s), person=person, output_tokens=9, is_whole=is_whole)


def test_text_that_is_there_is_read_at_once():
    """Two tokens are read by 2, the third from 12 on; the fourth comes at 13.2, after a stall of 0.2."""
    [pause] = after_pauses(record(0.0, 0.0, 5.0, 13.2), horizon_s=60)
    assert (pause.begin_s, pause.end_s) == (2.0, 12.0)
    assert pause.next_read_s == pytest.approx(1.0)
    assert pause.longest_stall_s == pytest.approx(0.2)
    assert (pause.was_generating, pause.is_generating) == (True, True)


def test_text_that_is_late_is_a_stall_from_the_end_of_the_pause():
    """Nothing until 14.5: 2.5 of waiting and 1 of reading; then 1 more until 16.5."""
    [pause] = after_pauses(record(0.0, 0.0, 14.5, 16.5), horizon_s=60)
    assert pause.next_read_s == pytest.approx(3.5)
    assert pause.longest_stall_s == pytest.approx(2.5)


def test_stalls_count_for_ten_seconds_after_the_pause():
    """The third and fourth are read by 14; the fifth comes at 21.5, so 7.5 of waiting. Then 30 - 22.5."""
    [pause] = after_pauses(record(0.0, 0.0, 5.0, 5.0, 21.5, 30.0), horizon_s=60)
    assert pause.longest_stall_s == pytest.approx(7.5)
    [late] = after_pauses(record(0.0, 0.0, *[5.0] * 9, 40.0), horizon_s=60)
    assert late.longest_stall_s == pytest.approx(1.0)  # dry from 21 on; 22 is as far as one looks


def test_an_answer_that_is_over_by_then_is_read_from_the_buffer():
    [pause] = after_pauses(record(0.0, 0.0, 5.0, 5.0), horizon_s=60)
    assert (pause.was_generating, pause.is_generating) == (True, False)
    [whole] = after_pauses(record(0.0, 0.0, 1.0), horizon_s=60)
    assert (whole.was_generating, whole.is_generating) == (False, False)


def test_an_answer_that_was_read_by_then_has_no_pause():
    assert after_pauses(record(0.0, 0.0), horizon_s=60) == []
    assert after_pauses(record(), horizon_s=60) == []


def test_an_answer_that_breaks_off_is_waited_for_until_the_horizon():
    [pause] = after_pauses(record(0.0, 0.0, is_whole=False), horizon_s=60)
    assert pause.next_read_s == 48.0
    assert pause.longest_stall_s == 10.0
    assert pause.is_generating


def test_shares_over_all_pauses():
    """Next token after 1, 3.5 and 1 seconds; longest stalls 0.2, 2.5 and 0."""
    records = [
        record(0.0, 0.0, 5.0, 13.2),
        record(0.0, 0.0, 14.5, 16.5),
        record(0.0, 0.0, 5.0, 5.0),
        record(0.0, 9.0, person=Person(1.0)),
    ]
    figures = summarise_pauses(records, horizon_s=60)
    assert figures is not None
    assert (figures["pauses"], figures["was_generating"], figures["is_generating"]) == (3, 3, 2)
    assert (figures["next_read_p50_s"], figures["next_read_p99_s"]) == pytest.approx((1.0, 3.5))
    assert figures["reads_on_share"] == pytest.approx(2 / 3)
    assert (figures["longest_stall_p50_s"], figures["longest_stall_p99_s"]) == pytest.approx((0.2, 2.5))
    assert figures["smooth_share"] == pytest.approx(2 / 3)
    assert summarise_pauses(records[-1:], horizon_s=60) is None
