"""When a report is due, and what it says: by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from tokenflow_client import TokenFlowReader
from tokenflow_client._track import (
    AT_ONCE_S,
    HEARTBEAT_S,
    INTERVAL_S,
    PAUSED_HEARTBEAT_S,
    READ_ON_S,
    STILL_S,
    Track,
)


class Story:
    """A track, its clock, and a reporter that is never late: it looks every 10 ms."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.wakes = 0
        self.sent: list[dict[str, object]] = []
        self.reader = TokenFlowReader(**settings)
        self.track = Track(
            url="u", capability="c", reader=self.reader, clock=lambda: self.now_s, wake=self._woken
        )
        self.look()
        self.wait(INTERVAL_S + 0.02)
        self.sent.clear()

    def pull(self, *, content: bool = True, hold_s: float = 0.0) -> None:
        """The application gets an event, is busy with it, and asks for the next one."""
        self.track.hand_over(content=content)
        self.wait(hold_s)
        self.track.asked()

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 100)):
            self.now_s += 0.01
            self.look()

    def arrive(self, events: int, *, chars: int = 4) -> None:
        """So much of the answer comes at once, and its end."""
        for _ in range(events):
            self.track.hand_over(content=True, chars=chars)
            self.track.asked()
        self.track.over()

    def look(self) -> None:
        self.track.settle(self.now_s)
        if self.track.due(self.now_s):
            report = self.track.report(self.now_s)
            self.sent.append(report.wire(now_s=self.now_s))
            self.track.reported(report)

    def _woken(self) -> None:
        self.wakes += 1


def test_an_event_is_read_when_the_next_is_asked_for() -> None:
    """Not when it is handed over; and events without content do not count."""
    story = Story()
    story.pull(content=False)
    story.pull()
    story.track.hand_over(content=True)
    story.wait(0.01)
    assert [sent["tokens"] for sent in story.sent] == [1]
    story.track.asked()
    story.wait(INTERVAL_S + 0.02)
    assert [sent["tokens"] for sent in story.sent] == [1, 2]


def test_at_most_five_reports_a_second() -> None:
    """A reader at 50 tokens a second, whose rate nobody declared."""
    story = Story()
    for _ in range(500):
        story.pull(hold_s=0.02)
    assert 3 <= len(story.sent) <= 51
    assert story.sent[-1]["paused"] is False


def test_a_reader_who_stands_still_is_worth_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gateway may think that he reads on; not where there is nothing to read."""
    monkeypatch.setattr("tokenflow_client._track.STILL_S", 1.0)  # so that there is time before it is a pause
    story = Story()
    story.pull()
    story.track.hand_over(content=True)
    story.wait(0.9)
    assert [sent["tokens"] for sent in story.sent] == [1, 1, 1, 1, 1]
    story.track.asked()
    story.wait(0.3)
    told = len(story.sent)
    story.wait(HEARTBEAT_S - 0.3)
    assert len(story.sent) == told


def test_a_reader_as_declared_needs_few_reports() -> None:
    """The gateway carries on by itself: only heartbeats. A reader half as fast as declared needs more."""
    steady, slow = Story(rate=5.0), Story(rate=5.0)
    for _ in range(50):
        steady.pull(hold_s=0.2)
        slow.pull(hold_s=0.4)
    assert len(steady.sent) <= 10 / HEARTBEAT_S + 1
    assert len(slow.sent) > 2 * len(steady.sent)


def test_the_gateway_is_never_wrong_by_much() -> None:
    """What the reports say, carried on at the declared rate, is within a token of a reader who varies.

    Control: who does not listen to the reports and carries on from the start is wrong by many.
    """
    story = Story(rate=5.0)
    errors: list[float] = []
    began_s = story.now_s
    for number in range(200):
        hold_s = 0.1 + 0.4 * (number % 20 > 10)
        story.track.hand_over(content=True)
        for _ in range(round(hold_s * 100)):
            story.wait(0.01)
            said = story.track._said
            assert said is not None
            assert said.tokens is not None
            expected = said.tokens + (0 if said.paused else 5.0 * (story.now_s - said.at_s))
            errors.append(abs(expected - story.track.read))
        story.track.asked()
    assert max(errors) <= 2.1
    assert sum(errors) / len(errors) <= 1.0
    assert abs(5.0 * (story.now_s - began_s) - story.track.read) > 20


def test_an_explicit_pause_is_told_at_once_and_again() -> None:
    """And its end; meanwhile the pause is kept alive for the gateway, which forgets it after 15 s."""
    story = Story(rate=5.0)
    story.pull()
    story.wait(0.5)
    told = len(story.sent)
    with story.reader.paused():
        assert story.wakes == 1
        story.wait(AT_ONCE_S)
        assert [sent["paused"] for sent in story.sent[told:]] == [True]
        story.wait(3 * PAUSED_HEARTBEAT_S)
        assert [sent["paused"] for sent in story.sent[told:]] == [True] * 4
    assert story.wakes == 2
    story.wait(AT_ONCE_S)
    assert story.sent[-1]["paused"] is False


def test_an_application_that_keeps_an_event_has_paused() -> None:
    """Much longer than usual, that is; when it asks again, the reporter is woken."""
    story = Story()
    for _ in range(20):
        story.pull(hold_s=0.1)
    assert not any(sent["paused"] for sent in story.sent)
    story.track.hand_over(content=True)
    story.wait(STILL_S + 0.1)
    assert story.sent[-1]["paused"] is True
    wakes = story.wakes
    story.track.asked()
    assert story.wakes == wakes + 1
    story.wait(AT_ONCE_S)
    assert story.sent[-1]["paused"] is False


def test_a_slow_reader_is_not_taken_for_paused() -> None:
    """An event every two seconds: once that is usual, it is reading. Control: the first one is a pause."""
    story = Story()
    for _ in range(10):
        story.pull(hold_s=2.0)
    told = len(story.sent)
    assert any(sent["paused"] for sent in story.sent)
    for _ in range(5):
        story.pull(hold_s=2.0)
    assert not any(sent["paused"] for sent in story.sent[told:])


def test_an_application_that_waits_for_the_engine_has_not_paused() -> None:
    """It has asked, and nothing came."""
    story = Story()
    story.pull()
    story.wait(10)
    assert not any(sent["paused"] for sent in story.sent)


def test_a_voice_is_where_it_says() -> None:
    """Its player takes text ahead of the sound, which is not reading."""
    story = Story(kind="voice", rate=3.0)
    for _ in range(30):
        story.pull()
    story.wait(0.3)
    assert {sent["tokens"] for sent in story.sent} <= {0}
    story.reader.shown(tokens=7)
    story.wait(INTERVAL_S + 0.02)
    assert story.sent[-1]["tokens"] == 7
    assert story.sent[-1]["rate"] == 3.0


def test_characters_are_told_as_such() -> None:
    story = Story(kind="voice")
    story.reader.shown(chars=12)
    story.wait(INTERVAL_S + 0.02)
    assert story.sent[-1]["chars"] == 12
    assert "tokens" not in story.sent[-1]


def test_a_new_rate_is_told_at_once() -> None:
    story = Story(kind="voice", rate=3.0)
    story.wait(0.1)
    story.reader.rate = 4.5
    assert story.wakes == 1
    story.wait(AT_ONCE_S)
    assert story.sent[-1]["rate"] == 4.5


def test_the_end_is_told_once_if_it_is_news() -> None:
    """With the position; and not at all if that is known."""
    story = Story()
    story.pull()
    story.track.end()
    story.track.end()
    assert story.wakes == 1
    story.wait(1)
    assert [sent["tokens"] for sent in story.sent] == [1]


def test_numbers_grow_also_over_lost_reports() -> None:
    """A report that got lost is made up for by a newer one, with a newer number."""
    story = Story()
    lost = story.track.report(story.now_s)
    story.pull()
    story.wait(INTERVAL_S + 0.02)
    assert story.sent[0]["seq"] == lost.seq + 1


def test_age_is_the_time_since_it_was_true() -> None:
    story = Story()
    report = story.track.report(story.now_s)
    assert report.wire(now_s=story.now_s + 0.25)["age_ms"] == 250.0


# ---- after the end ----


def test_a_voice_is_followed_until_all_is_heard() -> None:
    """The answer is there at once, and heard at five tokens a second; then there is silence."""
    story = Story(kind="voice")
    story.arrive(20)
    for heard in range(1, 20):
        story.reader.shown(tokens=heard)
        story.wait(0.2)
    assert not story.track.ended
    assert story.sent[-1]["tokens"] == 19
    story.reader.shown(tokens=20)
    story.wait(0.01)
    assert story.track.ended
    assert story.sent[-1]["tokens"] == 20
    told = len(story.sent)
    story.wait(PAUSED_HEARTBEAT_S)
    assert len(story.sent) == told


def test_characters_are_counted_for_the_end_too() -> None:
    story = Story(kind="voice")
    story.arrive(5, chars=4)
    story.reader.shown(chars=19)
    story.wait(INTERVAL_S + 0.02)
    assert not story.track.ended
    story.reader.shown(chars=20)
    story.wait(0.01)
    assert story.track.ended
    assert story.sent[-1]["chars"] == 20


def test_what_is_read_by_asking_ends_with_the_answer() -> None:
    """All of it has been asked for, so that there is nothing to wait for."""
    story = Story()
    story.arrive(5)
    story.look()
    assert story.track.ended
    assert [sent["tokens"] for sent in story.sent] == [5]


def test_a_reader_who_stops_without_a_word_is_not_reported_as_slow() -> None:
    """Nothing is said of one who stands still after the end. Control: before it, much is."""
    left, held = Story(kind="voice"), Story(kind="voice")
    left.arrive(20)
    for _ in range(20):
        held.pull()
    for story in (left, held):
        story.reader.shown(tokens=3)
        story.wait(INTERVAL_S + 0.02)
        story.sent.clear()
        story.wait(10.0)
    assert left.sent == []
    assert len(held.sent) >= 10 / HEARTBEAT_S - 1
    left.wait(READ_ON_S - 10.0)
    assert left.track.ended
    assert left.sent == []


def test_a_reader_who_says_that_he_leaves_is_left_alone() -> None:
    """With one last report of what was heard."""
    story = Story(kind="voice")
    story.arrive(20)
    story.reader.shown(tokens=3)
    story.reader.close()
    story.wait(0.01)
    assert story.track.ended
    assert [sent["tokens"] for sent in story.sent] == [3]
    story.reader.shown(tokens=9)
    story.wait(1.0)
    assert len(story.sent) == 1


def test_a_pause_after_the_end_is_kept_alive_and_ends() -> None:
    story = Story(kind="voice", rate=5.0)
    story.arrive(20)
    story.reader.shown(tokens=3)
    story.reader.pause()
    story.wait(AT_ONCE_S + 0.02)
    assert story.sent[-1]["paused"] is True
    story.sent.clear()
    story.wait(2 * PAUSED_HEARTBEAT_S)
    assert [sent["paused"] for sent in story.sent] == [True] * 2
    story.reader.resume()
    story.wait(AT_ONCE_S + 0.02)
    assert story.sent[-1]["paused"] is False
    told = len(story.sent)
    story.wait(PAUSED_HEARTBEAT_S)
    assert len(story.sent) == told


def test_the_next_answer_ends_the_one_before() -> None:
    """What is heard of it is not told of the other. One last report says what was heard of that one."""
    story = Story(kind="voice")
    story.arrive(20)
    story.reader.shown(tokens=3)
    Track(url="next", capability="c", reader=story.reader, clock=lambda: story.now_s, wake=lambda: None)
    story.reader.shown(tokens=1)
    story.wait(1.0)
    assert story.track.ended
    assert [sent["tokens"] for sent in story.sent] == [3]
