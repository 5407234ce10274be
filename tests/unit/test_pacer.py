"""The pacer: text at the reader's pace, whatever the engine does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenflow_gateway.readers.estimator import Estimate, Estimator, Pace, Source
from tokenflow_gateway.relay.pacer import LEAD_S, Pacer

STEP_S = 0.01


def declared(rate: float) -> Pace:
    return Pace(rate, rate, rate, "declared")


class Run:
    """Tokens that arrive at given times, released by a pacer to a reader who is estimated to read them."""

    def __init__(self, arrivals: Sequence[float], pace: Pace) -> None:
        self.arrivals = arrivals
        self.estimator = Estimator(pace, reader="human", now=0.0)
        self.pacer = Pacer(now=0.0)
        self.released: list[float] = []
        self.most_ahead = 0.0

    def until(self, end: float, each_step: Callable[[float], None] = lambda now: None) -> Run:
        """Go on in small steps, as timers would; `each_step` may report on the reader."""
        for step in range(round(end / STEP_S) + 1):
            now = step * STEP_S
            each_step(now)
            while self._next_is_due(now):
                self.released.append(now)
                self.estimator.deliver([len(self.released)], [now])
            ahead = len(self.released) - self.estimator.estimate(now).consumed
            self.most_ahead = max(self.most_ahead, ahead)
        return self

    def _next_is_due(self, now: float) -> bool:
        count = len(self.released)
        if count == len(self.arrivals) or self.arrivals[count] > now:
            return False
        return self.pacer.wait_s(count, self.estimator.estimate(now), now) <= 0


def engine(rate: float, seconds: float, *, stalls: Sequence[tuple[float, float]] = ()) -> list[float]:
    """Arrival times of an engine's tokens; `stalls` are (begin, length)."""
    times = []
    for number in range(int(rate * seconds)):
        at = number / rate
        times.append(at + sum(length for begin, length in stalls if at >= begin))
    return times


def gaps(times: Sequence[float], after: float) -> list[float]:
    return [b - a for a, b in pairwise(times) if a >= after]


def test_the_first_text_is_not_held_up() -> None:
    run = Run(engine(50, 1), declared(5.0)).until(0.2)
    assert run.released[0] == 0.0
    assert LEAD_S * 5.0 < len(run.released) <= LEAD_S * 5.0 + 2.0


def test_a_stall_of_the_engine_is_not_seen() -> None:
    """An engine at ten times the reader's rate that then stops for three seconds, and one that does not."""
    arrivals = engine(50, 4, stalls=[(1.0, 3.0)])
    assert max(gaps(arrivals, 0.5)) > 2.9
    run = Run(arrivals, declared(5.0)).until(10.0)
    assert max(gaps(run.released, 1.0)) == pytest.approx(0.2, abs=2 * STEP_S)
    assert min(gaps(run.released, 1.0)) == pytest.approx(0.2, abs=2 * STEP_S)


def test_a_reader_faster_than_the_engine_is_never_held_up() -> None:
    arrivals = engine(5, 10)
    run = Run(arrivals, declared(20.0)).until(12.0)
    assert all(
        released - arrived <= STEP_S + 1e-9 for arrived, released in zip(arrivals, run.released, strict=True)
    )


def test_a_paused_reader_gets_nothing_and_then_goes_on() -> None:
    run = Run(engine(50, 4), declared(5.0))

    def pause(now: float) -> None:
        if math.isclose(now, 3.0) or math.isclose(now, 5.0):
            consumed = run.estimator.estimate(now).consumed
            run.estimator.report(at=now, position=consumed, rate=None, paused=math.isclose(now, 3.0), now=now)

    run.until(8.0, pause)
    assert not [at for at in run.released if 3.0 < at < 5.0]
    assert max(gaps(run.released, 5.2)) == pytest.approx(0.2, abs=3 * STEP_S)
    assert max(run.released) > 7.7


def test_a_new_rate_takes_effect_at_once() -> None:
    run = Run(engine(50, 6), declared(5.0))

    def faster(now: float) -> None:
        if math.isclose(now, 3.0):
            run.estimator.report(at=now, position=None, rate=20.0, paused=False, now=now)

    run.until(5.0, faster)
    assert gaps(run.released, 4.0) == pytest.approx([0.05] * len(gaps(run.released, 4.0)), abs=2 * STEP_S)


def test_whoever_is_only_assumed_to_be_average_is_paced_at_the_fast_end() -> None:
    run = Run(engine(50, 20), Pace(5.0, 4.0, 8.0, "model")).until(20.0)
    assert len(run.released) / 20.0 == pytest.approx(8.0, rel=0.05)


def test_who_reports_is_followed_from_then_on() -> None:
    run = Run(engine(50, 20), Pace(5.0, 4.0, 8.0, "model"))

    def report(now: float) -> None:
        if now >= 5.0:
            run.estimator.report(at=now, position=now * 2.0, rate=None, paused=False, now=now)

    run.until(30.0, report)
    assert 30.0 * 2.0 < len(run.released) <= 30.0 * 2.0 + 2.0 * LEAD_S + 2.0


def test_machines_get_everything_at_once() -> None:
    machine = Estimate(0.0, 5.0, 5.0, 5.0, "ahead", "declared")
    assert Pacer(now=0.0).wait_s(1000, machine, 0.0) == 0.0


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(0.5, 40.0),
    source=st.sampled_from(["declared", "model"]),
    waits=st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.02, 0.3, 1.5]), min_size=1, max_size=20),
)
def test_nobody_waits_for_text_that_is_there(rate: float, source: Source, waits: list[float]) -> None:
    """Released in time, in order, and never more than a lead ahead of the pace."""
    arrivals, at = [], 0.0
    for wait in waits:
        at += wait
        arrivals.append(at)
    run = Run(arrivals, Pace(rate, rate, rate, source))

    def look(now: float) -> None:
        state = run.estimator.estimate(now).state
        arrived = sum(time < now - 1.5 * STEP_S for time in arrivals)
        assert state != "stalled" or len(run.released) >= arrived

    run.until(at + 1.0, look)
    assert all(released >= arrived for arrived, released in zip(arrivals, run.released, strict=False))
    assert run.most_ahead <= max(LEAD_S * rate, 1.0) + 1.0
