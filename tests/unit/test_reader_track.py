"""From events and reports to a reader's position."""

from __future__ import annotations

import json

import pytest

from tokenflow_gateway.readers.progress import Capabilities, ProgressError, ProgressReport, decode_progress
from tokenflow_gateway.readers.track import REQUESTS_PER_S, ReaderTrack, TooManyReports


def track(words: str = "", *, declared_rate: float | None = None) -> ReaderTrack:
    made = ReaderTrack(reader="human", declared_rate=declared_rate, now=0.0)
    for word in words.split():
        made.content(word)
    made.delivered([made.shape.tokens], [0.0])
    return made


def report(seq: int, **fields: object) -> ProgressReport:
    return ProgressReport(seq=seq, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chars", "tokens"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.25), (6, 2.0), (7, 3.0), (8, 3.0), (999, 3.0)]
)
def test_characters_become_tokens(chars: int, tokens: float) -> None:
    """Tokens of two, four and one characters."""
    made = track("ab cdef g")
    made.progress([report(0, chars=chars)], 0.0)
    assert made.estimate(0.0).consumed == tokens


def test_tokens_win_over_characters() -> None:
    made = track("ab cdef g")
    made.progress([report(0, chars=7, tokens=1)], 0.0)
    assert made.estimate(0.0).consumed == 1.0


def test_what_was_seen_or_is_older_changes_nothing() -> None:
    made = track("a b c d e f g h", declared_rate=1.0)
    assert made.progress([report(5, tokens=2)], 0.0) == 1
    assert made.progress([report(5, tokens=8), report(4, tokens=8)], 0.0) == 0
    assert made.estimate(0.0).consumed == 2.0


def test_age_places_a_report_in_the_past() -> None:
    made = track("a b c d e f g h", declared_rate=2.0)
    made.progress([report(0, tokens=1, age_ms=500.0)], 10.0)
    assert made.estimate(10.0).consumed >= 2.0


@pytest.mark.parametrize(("declared", "taken"), [(1000.0, 10.0), (8.0, 8.0), (1.0, 6.0)])
def test_reports_declare_no_rate_that_the_class_may_not(declared: float, taken: float) -> None:
    made = ReaderTrack(reader="human", declared_rate=9.0, rate_floor=6.0, max_rate=10.0, now=0.0)
    made.progress([report(0, rate=declared)], 0.0)
    assert made.estimate(0.0).rate == taken


def test_hidden_is_a_pause_and_visible_its_end() -> None:
    made = track("a b c d e f g h", declared_rate=1.0)
    made.progress([report(0, tokens=1, visible=False)], 0.0)
    assert made.estimate(5.0).state == "paused"
    made.progress([report(1, tokens=1)], 5.0)
    assert made.estimate(6.0).consumed == 2.0


def test_a_hidden_page_pauses_nobody_who_listens() -> None:
    made = ReaderTrack(reader="voice", declared_rate=None, now=0.0)
    for _ in range(400):
        made.content("word ")
    made.delivered([400], [0.0])
    for second in range(1, 9):
        made.progress([report(second, tokens=3.0 * second, rate=3.0, visible=False)], float(second))
    estimate = made.estimate(8.9)
    assert (estimate.state, estimate.consumed) == ("reading", pytest.approx(26.7))
    made.progress([report(9, tokens=27, paused=True, visible=False)], 9.0)
    assert made.estimate(9.0).state == "paused"


def test_the_error_is_that_of_the_reports_time() -> None:
    made = track("word " * 100, declared_rate=5.0)
    made.progress([report(0, tokens=40.0, age_ms=2000.0)], 10.0)
    assert made.error_tokens == pytest.approx(0.0)
    made.progress([report(1, tokens=42.0), report(1, tokens=99.0)], 10.0)
    assert made.error_tokens == pytest.approx(8.0)
    made.progress([report(2, rate=5.0)], 10.0)
    assert made.error_tokens is None


def test_positions_beyond_what_was_delivered_are_told_apart() -> None:
    made = track("ab cd ef")
    made.progress([report(0, tokens=3), report(1, chars=6)], 0.0)
    assert made.clamped == 0
    made.progress([report(2, tokens=4), report(3, chars=7), report(4, tokens=1)], 0.0)
    assert made.clamped == 2


def test_a_pause_may_come_without_a_position() -> None:
    made = track("a b c d e f g h", declared_rate=1.0)
    made.progress([report(0, visible=False)], 2.0)
    assert made.estimate(9.0).consumed == 2.0


def test_reasoning_takes_no_time_and_counts_as_read() -> None:
    made = track("a b", declared_rate=1.0)
    made.hidden()
    made.hidden()
    estimate = made.estimate(1.0)
    assert estimate.consumed == 1.0
    assert made.consumed_tokens(estimate) == 3.0


def test_the_model_learns_the_script_of_the_text() -> None:
    latin, wide = track("word " * 40), track("巴黎 " * 40)
    assert latin.estimate(0.0).source == wide.estimate(0.0).source == "model"
    assert wide.estimate(0.0).rate < latin.estimate(0.0).rate


def test_a_flood_is_refused_and_takes_nothing() -> None:
    made = track("a b c")
    for _ in range(REQUESTS_PER_S):
        made.admit_request(1.0)
    with pytest.raises(TooManyReports):
        made.admit_request(1.0)
    made.admit_request(1.2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "missing required field `reports`"),
        ({"reports": []}, "length >= 1"),
        ({"reports": [{"seq": 0, "tokens": 1}] * 65}, "length <= 64"),
        ({"reports": [{"tokens": 1}]}, "seq"),
        ({"reports": [{"seq": -1, "tokens": 1}]}, ">= 0"),
        ({"reports": [{"seq": 0}]}, "needs a position"),
        ({"reports": [{"seq": 0, "tokens": -1}]}, ">= 0"),
        ({"reports": [{"seq": 0, "tokens": 1, "rate": 0}]}, "> 0"),
        ({"reports": [{"seq": 0, "tokens": 1, "rate": 1e9}]}, "<= 1000"),
        ({"reports": [{"seq": 0, "tokens": 1, "age_ms": 1e9}]}, "<= 60000"),
        ({"reports": [{"seq": 0, "tokens": "1"}]}, "Expected `float | null`"),
    ],
)
def test_absurd_reports_are_refused_in_words(batch: object, message: str) -> None:
    with pytest.raises(ProgressError) as raised:
        decode_progress(json.dumps(batch).encode())
    assert message in str(raised.value)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"reports": [{"seq": 0, "tokens": NaN}]}'])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ProgressError):
        decode_progress(body)


def test_a_batch_is_taken_in_order() -> None:
    _, reports = decode_progress(b'{"reports": [{"seq": 3, "tokens": 3}, {"seq": 1, "tokens": 1}]}')
    assert [entry.seq for entry in reports] == [1, 3]


def test_a_capability_is_for_one_stream_of_one_process() -> None:
    ours = Capabilities(b"key")
    granted = ours.grant("tf-1")
    assert ours.allows("tf-1", granted)
    assert not ours.allows("tf-2", granted)
    assert not Capabilities(b"other").allows("tf-1", granted)
    assert not ours.allows("tf-1", "")
    assert not ours.allows("tf-1", "\ud800ü")


def test_an_event_of_several_tokens_spreads_its_characters_over_them() -> None:
    made = ReaderTrack(reader="human", declared_rate=None, now=0.0)
    made.content("ab")
    made.content("cdefgh", tokens=3)
    made.content("\U0001f30d", tokens=3)
    made.delivered([7], [0.0])
    for seq, (chars, tokens) in enumerate([(2, 1.0), (4, 2.0), (5, 2.5), (8, 4.0), (9, 7.0)]):
        made.progress([report(seq, chars=chars)], 0.0)
        assert made.reported == tokens


def test_clients_count_events() -> None:
    made = ReaderTrack(reader="human", declared_rate=None, now=0.0)
    for text, tokens in [("a", 1), ("bcd", 3), ("e", 0), ("f", 1)]:
        made.content(text, tokens)
    made.delivered([5], [0.0])
    for seq, (events, tokens) in enumerate([(1, 1.0), (1.5, 2.5), (2, 4.0), (3, 4.0), (4, 5.0), (9, 5.0)]):
        made.progress([report(seq, tokens=events)], 0.0)
        assert made.reported == tokens


def test_nobody_has_read_what_was_not_handed_over() -> None:
    made = ReaderTrack(reader="human", declared_rate=100.0, now=0.0)
    for _ in range(10):
        made.content("ab")
    made.delivered([4], [0.0])
    made.progress([report(0, tokens=9)], 0.0)
    assert (made.reported, made.estimate(9.0).consumed) == (4.0, 4.0)
