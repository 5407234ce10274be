"""The figures of the thousand streams, and the spread over repetitions, worked out by hand."""

from __future__ import annotations

import math

import pytest

from tokenflow_bench.readers.paused.measure import (
    Gaps,
    Usage,
    per_event_us,
    per_stopped_kib,
    per_stream_kib,
)
from tokenflow_bench.spread import Spread, percentile
from tokenflow_bench.tables import Table, spread


def test_a_percentile_is_a_value_that_was_there() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, percent) for percent in (0, 20, 21, 50, 99, 100)] == [1, 1, 2, 3, 5, 5]
    assert math.isnan(percentile([], 50))


def test_a_spread_is_median_range_and_what_is_missing() -> None:
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, missing=1)
    assert Spread.of([None, None]) == Spread(None, None, None, missing=2)


def test_gaps_in_milliseconds() -> None:
    """Ninety-eight of 200 ms, one of 300 ms, one of 900 ms."""
    gaps = Gaps.of([0.9, *[0.2] * 98, 0.3])
    assert (gaps.count, gaps.p50_ms, gaps.p99_ms, gaps.worst_ms) == (100, 200.0, 300.0, 900.0)


def test_an_event_costs_what_is_used_beyond_the_time_without() -> None:
    """A tenth of a core without; with 1000 events in two seconds 0.4 s of it, of which 0.2 s are theirs."""
    without = Usage(cpu_s=0.5, wall_s=5.0)
    assert without.share == 0.1
    assert per_event_us(without, Usage(cpu_s=0.4, wall_s=2.0), events=1000) == pytest.approx(200.0)


def test_memory_of_a_stream_is_what_came_on_top() -> None:
    assert per_stream_kib(idle_bytes=10 * 1024, open_bytes=110 * 1024, streams=50) == 2.0


def test_memory_of_a_stopped_stream_follows_from_the_mixture() -> None:
    """Of ten streams two have stopped and hold 90 KiB, the others 30: 42 on average."""
    assert per_stopped_kib(reading_kib=30.0, mixed_kib=42.0, streams=10, stopped=2) == 90.0


def test_tables_are_aligned_in_the_terminal_and_piped_in_markdown() -> None:
    table = Table(["reader", "error"], [["a", "0.5"], ["longer one", "12"]])
    assert table.text().splitlines() == [
        "reader      error",
        "----------  -----",
        "a           0.5",
        "longer one  12",
    ]
    assert table.markdown().splitlines()[1:3] == ["| --- | --- |", "| a | 0.5 |"]


def test_a_spread_is_shown_with_its_range() -> None:
    assert spread(Spread.of([1.0, 2.0, 4.0]), 1) == "2.0 (1.0 to 4.0)"
    assert spread(Spread.of([2.0]), 1) == "2.0"
    assert spread(Spread.of([150.0, None])) == "150, 1x not"
    assert spread(Spread.of([None])) == "-"
