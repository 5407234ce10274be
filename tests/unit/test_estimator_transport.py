"""What the estimator makes of transport evidence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_engine.protocol import Reader
from tokenflow_gateway.readers.estimator import PAUSE_EXPIRES_S, Estimator, Pace

PACE = Pace(5.0, 4.0, 6.0, "model")


def reader(*, delivered: int = 1000, kind: Reader = "human") -> Estimator:
    made = Estimator(PACE, reader=kind, now=0.0)
    made.deliver([delivered], [0.0])
    return made


def cap(made: Estimator, at_most: float | None, *, stalled: bool = False, now: float) -> None:
    made.transport(at_most=at_most, position=None, stalled=stalled, now=now)


def see(made: Estimator, position: float, *, now: float) -> None:
    made.transport(at_most=None, position=position, stalled=False, now=now)


def test_a_cap_holds_the_position_back_and_says_so() -> None:
    made = reader()
    cap(made, 8.0, now=0.0)
    estimate = made.estimate(10.0)
    assert (estimate.consumed, estimate.source) == (8.0, "transport")


def test_a_cap_that_does_not_bind_changes_nothing() -> None:
    made = reader()
    cap(made, 100.0, now=0.0)
    estimate = made.estimate(2.0)
    assert (estimate.consumed, estimate.rate, estimate.source) == (10.0, 5.0, "model")


def test_a_cap_behind_what_was_shown_stops_it_until_it_is_caught_up_with() -> None:
    made = reader()
    assert made.estimate(4.0).consumed == 20.0
    cap(made, 10.0, now=4.0)
    assert made.estimate(8.0).consumed == 20.0
    cap(made, None, now=8.0)
    assert made.estimate(9.0).consumed == 20.0, "the position within is 15"
    assert made.estimate(11.0).consumed == 25.0


def test_a_machine_has_read_up_to_the_cap() -> None:
    made = reader(kind="machine", delivered=0)
    cap(made, 12.0, now=0.0)
    made.deliver([1000], [0.0])
    assert (made.estimate(1.0).consumed, made.estimate(1.0).state) == (12.0, "ahead")
    cap(made, 12.0, stalled=True, now=1.0)
    assert made.estimate(1.0).state == "paused"
    cap(made, None, now=2.0)
    assert made.estimate(2.0).consumed == 1000.0


def test_a_proven_pause_lasts_as_long_as_it_is_seen() -> None:
    made = reader()
    for second in range(1, 100):
        cap(made, 500.0, stalled=True, now=float(second))
    estimate = made.estimate(99.0)
    assert (estimate.state, estimate.consumed, estimate.source) == ("paused", 5.0, "transport")
    cap(made, 500.0, now=100.0)
    assert made.estimate(101.0).state == "reading"
    assert made.estimate(101.0).consumed == pytest.approx(10.0)


def test_a_pause_that_can_no_longer_be_seen_expires() -> None:
    made = reader()
    cap(made, 0.0, stalled=True, now=0.0)
    made.transport_ended(10.0)
    assert made.estimate(10.0 + PAUSE_EXPIRES_S - 0.1).state == "paused"
    assert made.estimate(10.0 + PAUSE_EXPIRES_S + 1.0).consumed == pytest.approx(5.0)


def test_reports_are_stronger_and_silence_after_them_is_not() -> None:
    made = reader()
    cap(made, 1.0, stalled=True, now=0.0)
    made.report(at=1.0, position=50.0, rate=None, paused=False, now=1.0)
    assert (made.estimate(1.0).state, made.estimate(1.0).consumed) == ("reading", 50.0)
    cap(made, 1.0, stalled=True, now=2.0)
    see(made, 1.0, now=2.5)
    assert made.estimate(3.0).source == "progress"
    assert made.estimate(3.0).consumed == 60.0
    cap(made, 200.0, stalled=True, now=1.0 + PAUSE_EXPIRES_S)
    assert made.estimate(30.0).state == "paused"


@pytest.mark.parametrize("new_rate", [1.0, 2.5, 10.0, 30.0])
def test_a_changed_rate_is_followed_within_two_seconds(new_rate: float) -> None:
    made = reader()
    position = 0.0
    for tick in range(1, 81):
        position += 0.1 * (5.0 if tick <= 60 else new_rate)
        see(made, position, now=tick * 0.1)
    assert made.estimate(8.0).rate == pytest.approx(new_rate, rel=0.2)
    assert made.estimate(8.0).source == "transport"


def test_the_rate_is_within_its_band_when_two_looks_at_one_moment_have_taught_it() -> None:
    made = reader(delivered=3)
    see(made, 0.0, now=0.0)
    see(made, 3.0, now=1.0)
    assert made.estimate(1.0).rate == 5.0, "it had to wait"
    made.deliver([1000], [1.0])
    see(made, 3.0, now=1.0)
    estimate = made.estimate(1.0)
    assert (estimate.rate, estimate.rate_low, estimate.rate_high) == pytest.approx((3.0, 2.4, 3.6))


def test_steps_teach_the_rate_too() -> None:
    made = reader()
    for step in range(1, 8):
        see(made, step * 20.0, now=step * 2.0)
    assert made.estimate(14.0).rate == pytest.approx(10.0, rel=0.1)
    assert made.watched == pytest.approx((120.0, 12.0)), "what was counted once is not counted again"


def test_a_pause_is_not_slow_reading_but_silence_twice_is() -> None:
    made = reader()
    for tick in range(1, 6):
        see(made, tick * 10.0, now=float(tick))
    fast = made.estimate(5.0).rate
    for now in (15.0, 25.0):
        cap(made, None, stalled=True, now=now - 5.0)
        see(made, 50.0 + (now - 5.0), now=now)
        if now == 15.0:
            assert made.estimate(now).rate == fast
    assert made.estimate(25.0).rate == pytest.approx(1.0, rel=0.3)


class SmallBuffer:
    """A client that takes text at its own pace out of a buffer for so many tokens."""

    def __init__(self, tokens: float) -> None:
        self.room = tokens
        self.position = 0.0

    def read(self, seconds: float, rate: float, delivered: int) -> None:
        self.position = min(float(delivered), self.position + seconds * rate)


steps = st.lists(
    st.tuples(st.floats(0.05, 0.3), st.floats(0.5, 30), st.integers(0, 20), st.booleans(), st.booleans()),
    max_size=80,
)


@given(steps, st.floats(1, 50), st.sampled_from(["human", "machine"]))
def test_the_cap_is_respected_and_the_invariants_hold(
    story: list[tuple[float, float, int, bool, bool]], room: float, kind: Reader
) -> None:
    made, client = reader(delivered=0, kind=kind), SmallBuffer(room)
    now, delivered, last = 0.0, 0, 0.0
    for seconds, rate, tokens, paused, seen in story:
        delivered += tokens
        made.deliver([delivered], [now])
        shown_before = made.estimate(now).consumed
        if not paused:
            client.read(seconds, rate, delivered)
        now += seconds
        shown_before = max(shown_before, made.estimate(now).consumed)
        at_most = min(client.position + client.room, float(delivered))
        made.transport(at_most=at_most, position=client.position if seen else None, stalled=paused, now=now)
        estimate = made.estimate(now)
        assert last - 1e-9 <= estimate.consumed <= delivered
        assert estimate.consumed <= max(shown_before, at_most) + 1e-9
        assert (estimate.state == "paused") == paused
        assert 0 < estimate.rate_low <= estimate.rate <= estimate.rate_high
        later = made.estimate(now + 0.1)
        assert later.consumed <= max(estimate.consumed, at_most) + 1e-9
        if paused:
            assert later.consumed == estimate.consumed
        last = estimate.consumed


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3),
            st.one_of(st.none(), st.floats(-50, 500)),
            st.one_of(st.none(), st.floats(-50, 500)),
            st.booleans(),
            st.integers(0, 30),
            st.sampled_from(["look", "report", "end"]),
        ),
        max_size=50,
    )
)
def test_no_evidence_however_wrong_breaks_the_invariants(
    story: list[tuple[float, float | None, float | None, bool, int, str]],
) -> None:
    made = reader(delivered=0)
    now, delivered, last = 0.0, 0, 0.0
    for wait_s, at_most, position, flag, tokens, what in story:
        now += wait_s
        delivered += tokens
        made.deliver([delivered], [now])
        if what == "look":
            made.transport(at_most=at_most, position=position, stalled=flag, now=now)
        elif what == "report":
            made.report(at=now, position=position, rate=None, paused=flag, now=now)
        else:
            made.transport_ended(now)
        estimate = made.estimate(now)
        assert last <= estimate.consumed <= delivered
        assert 0 < estimate.rate_low <= estimate.rate <= estimate.rate_high
        last = estimate.consumed
