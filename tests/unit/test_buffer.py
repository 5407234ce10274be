"""The virtual buffer, alone and on both sides of a link that loses, delays and reorders reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenflow_engine.buffer import VirtualBuffer
from tokenflow_engine.protocol import Reading


def reading(at: float, consumed: float, *, rate: float = 5.0, paused: bool = False, seq: int = 0) -> Reading:
    return Reading(
        rid="r",
        at=at,
        consumed=consumed,
        rate=rate,
        rate_low=rate,
        rate_high=rate,
        paused=paused,
        seq=seq,
    )


def test_the_reader_moves_at_his_rate_and_waits_at_the_end() -> None:
    buffer = VirtualBuffer(rate=5.0, now=0.0)
    buffer.generate(10, now=0.0)
    assert (buffer.consumed_at(1.0), buffer.buffered_at(1.0)) == (5.0, 5.0)
    assert buffer.buffered_at(60.0) == 0.0
    buffer.generate(20, now=60.0)
    assert buffer.consumed_at(61.0) == 15.0, "from the end of what there was, not from a position beyond it"


def test_a_pause_stops_the_reader_and_its_end_lets_him_go_on() -> None:
    buffer = VirtualBuffer(rate=5.0, now=0.0)
    buffer.generate(100, now=0.0)
    assert buffer.report(reading(1.0, 5.0, paused=True), now=1.0)
    assert buffer.consumed_at(50.0) == 5.0
    assert buffer.report(reading(50.0, 5.0), now=50.0)
    assert buffer.consumed_at(51.0) == 10.0


def test_a_late_report_is_moved_on_to_now() -> None:
    buffer = VirtualBuffer(rate=1.0, now=0.0)
    buffer.generate(100, now=0.0)
    buffer.report(reading(2.0, 10.0), now=3.0)
    assert buffer.consumed_at(3.0) == 15.0


def test_an_overtaken_report_is_ignored() -> None:
    buffer = VirtualBuffer(rate=5.0, now=0.0)
    buffer.generate(100, now=0.0)
    buffer.report(reading(3.0, 20.0), now=3.0)
    assert not buffer.report(reading(2.0, 90.0, paused=True), now=3.1)
    assert not buffer.paused
    assert buffer.consumed_at(3.0) == 20.0


def test_numbers_say_which_report_is_newer_whatever_clocks_do() -> None:
    buffer = VirtualBuffer(rate=5.0, now=7200.0)
    buffer.generate(1000, now=7200.0)
    assert buffer.report(reading(7200.0, 50.0, seq=1), now=7200.0)
    assert buffer.report(reading(3601.0, 60.0, paused=True, seq=2), now=7201.0), "an hour back"
    assert (buffer.paused, buffer.consumed_at(9000.0)) == (True, 60.0)
    assert buffer.report(reading(10802.0, 61.0, seq=4), now=7202.0), "and forth again"
    assert not buffer.report(reading(7202.0, 99.0, seq=3), now=7203.0)
    assert buffer.consumed_at(7203.0) == 66.0


def test_a_report_from_long_ago_counts_from_now() -> None:
    buffer = VirtualBuffer(rate=5.0, now=5000.0)
    buffer.generate(1000, now=5000.0)
    buffer.report(reading(1400.0, 10.0, seq=1), now=5000.0)
    assert buffer.consumed_at(5001.0) == 15.0


def test_a_report_from_a_clock_ahead_of_ours_counts_from_now() -> None:
    buffer = VirtualBuffer(rate=5.0, now=0.0)
    buffer.generate(100, now=0.0)
    buffer.report(reading(9.0, 10.0), now=1.0)
    assert buffer.consumed_at(2.0) == 15.0


def test_without_a_reader_it_goes_on_unpaused() -> None:
    buffer = VirtualBuffer(rate=5.0, now=0.0)
    buffer.generate(100, now=0.0)
    buffer.report(reading(0.0, 0.0, paused=True), now=0.0)
    buffer.forget_reader(rate=2.0, now=10.0)
    assert buffer.consumed_at(11.0) == 2.0


events = st.lists(
    st.tuples(
        st.floats(0, 5),
        st.one_of(
            st.integers(0, 40),
            st.tuples(st.floats(-10, 500), st.floats(0.1, 50), st.booleans(), st.floats(-3, 3)),
        ),
    ),
    max_size=40,
)


@given(events)
def test_never_negative_never_beyond_what_was_generated(story: list[tuple[float, object]]) -> None:
    buffer = VirtualBuffer(rate=5.0, now=0.0)
    now, generated = 0.0, 0
    for wait_s, event in story:
        now += wait_s
        if isinstance(event, int):
            generated += event
            buffer.generate(generated, now=now)
        else:
            consumed, rate, paused, lag_s = event  # type: ignore[misc]
            buffer.report(reading(now - lag_s, consumed, rate=rate, paused=paused), now=now)
        assert 0 <= buffer.consumed_at(now) <= buffer.generated == generated
        assert buffer.buffered_at(now + 1.0) <= buffer.buffered_at(now)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 2), st.integers(0, 30), st.floats(0.5, 20), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    st.data(),
)
def test_both_sides_agree_after_the_last_report_whatever_the_link_did(
    story: list[tuple[float, int, float, bool]], data: st.DataObject
) -> None:
    """The gateway's copy and the engine's buffer, told the same reports, of which some come late or never."""
    ours, engines = VirtualBuffer(rate=5.0, now=0.0), VirtualBuffer(rate=5.0, now=0.0)
    now, generated, sent = 0.0, 0, []
    for wait_s, tokens, rate, paused in story:
        now += wait_s
        generated += tokens
        for side in (ours, engines):
            side.generate(generated, now=now)
        report = reading(now, ours.consumed_at(now), rate=rate, paused=paused)
        ours.report(report, now=now)
        sent.append(report)
    lost_or_late = data.draw(st.permutations(sent[:-1]))[: data.draw(st.integers(0, len(sent)))]
    for report in [*lost_or_late, sent[-1]]:
        engines.report(report, now=now)
    for later_s in (0.0, 0.5, 10.0):
        assert abs(engines.consumed_at(now + later_s) - ours.consumed_at(now + later_s)) < 1e-6
