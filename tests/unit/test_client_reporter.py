"""The reporter's thread, with a network that the test makes."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tokenflow_client import TokenFlowReader
from tokenflow_client import _reporter as reporter_module
from tokenflow_client._reporter import Answer, Reporter
from tokenflow_client._track import Track

PATIENCE_S = 5.0
pytestmark = pytest.mark.timeout(30)


class Network:
    """Answers as it is told, in turn, and the last answer for ever."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self._answers = list(answers) or [Answer(200)]
        self.bodies: queue.Queue[dict[str, Any]] = queue.Queue()
        self.closed = threading.Event()

    def send(self, url: str, body: bytes) -> Answer:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        self.bodies.put({"url": url, **json.loads(body)})
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed.set()

    def next(self) -> dict[str, Any]:
        return self.bodies.get(timeout=PATIENCE_S)


@contextmanager
def reporting(network: Network) -> Iterator[Reporter]:
    reporter = Reporter(lambda: network)
    try:
        yield reporter
    finally:
        reporter.close()


def follow(reporter: Reporter, url: str = "u", reader: TokenFlowReader | None = None) -> Track:
    reader = reader or TokenFlowReader()
    track = Track(url=url, capability="c", reader=reader, clock=reporter._clock, wake=reporter.wake)
    reporter.follow(track)
    return track


def read_one(track: Track) -> None:
    track.hand_over(content=True)
    track.asked()


def is_reporting() -> bool:
    return any(thread.name == "tokenflow-reports" for thread in threading.enumerate())


def wait_for(reporter: Reporter, **counts: int) -> None:
    """Let the thread run until its statistics say so."""
    deadline = threading.Event()
    timer = threading.Timer(PATIENCE_S, deadline.set)
    timer.start()
    try:
        while any(getattr(reporter.statistics(), name) != count for name, count in counts.items()):
            assert not deadline.is_set(), (reporter.statistics(), counts)
            deadline.wait(0.005)
    finally:
        timer.cancel()


def test_each_stream_has_its_own_reports() -> None:
    network = Network()
    with reporting(network) as reporter:
        tracks = [follow(reporter, "a"), follow(reporter, "b")]
        assert {network.next()["url"], network.next()["url"]} == {"a", "b"}
        read_one(tracks[1])
        body = network.next()
        assert (body["url"], body["capability"], body["reports"][0]["tokens"]) == ("b", "c", 1)


def test_close_sends_what_is_due_and_leaves_nothing() -> None:
    """The last position, then no thread, and the connection closed."""
    network = Network()
    with reporting(network) as reporter:
        track = follow(reporter)
        network.next()
        read_one(track)
    assert network.next()["reports"][0]["tokens"] == 1
    assert network.closed.is_set()
    assert not is_reporting()
    assert reporter.statistics().open == 0


def test_a_voice_is_followed_beyond_its_answer_and_closing_does_not_wait_for_it() -> None:
    network, voice = Network(), TokenFlowReader(kind="voice")
    with reporting(network) as reporter:
        track = follow(reporter, reader=voice)
        track.hand_over(content=True)
        track.hand_over(content=True)
        track.over()
        assert network.next()["reports"][0]["tokens"] == 0
        voice.shown(tokens=1)
        assert network.next()["reports"][0]["tokens"] == 1
        assert reporter.statistics().open == 1
    assert not is_reporting()
    assert network.bodies.empty(), "there was no news"


def test_a_thread_without_streams_ends_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """For clients that nobody closes."""
    monkeypatch.setattr(reporter_module, "LINGER_S", 0.01)
    network = Network()
    with reporting(network) as reporter:
        follow(reporter).end()
        assert network.closed.wait(PATIENCE_S)
        network.closed.clear()
        follow(reporter, "again")
        assert {network.next()["url"], network.next()["url"]} == {"u", "again"}


def test_a_lost_report_is_dropped_counted_and_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the newest position, after a while."""
    monkeypatch.setattr(reporter_module, "RETRY_S", 0.01)
    network = Network(OSError("no route"), Answer(503), Answer(200))
    with reporting(network) as reporter:
        track = follow(reporter)
        network.next()
        read_one(track)
        network.next()
        assert network.next()["reports"][0]["tokens"] == 1
        wait_for(reporter, dropped=2, sent=1)


def test_a_network_that_is_down_is_not_asked_all_the_time() -> None:
    """The second stream's reports wait with the first one's. Control: the test above."""
    network = Network(OSError("down"))
    with reporting(network) as reporter:
        follow(reporter, "a")
        network.next()
        wait_for(reporter, dropped=1)
        track = follow(reporter, "b")
        for _ in range(50):
            read_one(track)
            reporter.wake()
        track.end()
        wait_for(reporter, open=1, dropped=2)
    assert network.bodies.empty()
    assert reporter.statistics().dropped == 3, "one that was tried, and the last ones of both streams"


@pytest.mark.parametrize(
    ("status", "count"), [(403, "refused"), (400, "refused"), (404, "late"), (410, "late")]
)
def test_a_refused_stream_is_left_alone(status: int, count: str) -> None:
    network = Network(Answer(status), Answer(200))
    with reporting(network) as reporter:
        track = follow(reporter)
        wait_for(reporter, open=0, **{count: 1})
        read_one(track)
        follow(reporter, "other")
        network.next()
        assert network.next()["url"] == "other"
        wait_for(reporter, sent=1)


def test_too_many_is_waited_out_by_that_stream_alone() -> None:
    network = Network(Answer(429, retry_after_s=1000.0), Answer(200))
    with reporting(network) as reporter:
        slow = follow(reporter)
        wait_for(reporter, dropped=1)
        read_one(slow)
        follow(reporter, "other")
        network.next()
        assert network.next()["url"] == "other"
        wait_for(reporter, sent=1, dropped=1)


def test_closing_does_not_wait_for_a_network_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than its limit, that is; the thread is left to end by itself, and does."""
    monkeypatch.setattr(reporter_module, "CLOSE_S", 0.05)
    network, gate = Network(), threading.Event()
    send = network.send

    def hangs(url: str, body: bytes) -> Answer:
        answer = send(url, body)
        assert gate.wait(PATIENCE_S)
        return answer

    monkeypatch.setattr(network, "send", hangs)
    reporter = Reporter(lambda: network)
    follow(reporter)
    network.next()
    reporter.close()
    assert is_reporting()
    gate.set()
    assert network.closed.wait(PATIENCE_S)
