"""Sends reports, out of band: one thread for all streams of a client, and only while there are streams."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

from tokenflow_client._track import Track

__all__ = ["Answer", "Post", "Reporter", "Statistics"]

TICK_S = 0.05
LINGER_S = 5.0
"""A thread without streams ends after this; the next stream starts one again."""
CLOSE_S = 2.0
RETRY_S = 1.0
MAX_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the gateway said to a report. `retry_after_s` is 0 where it said nothing about it."""

    status: int
    retry_after_s: float = 0.0


class Post(Protocol):
    """Sends one body. May block, only ever in the reporter's thread; raises whatever the network brings."""

    def send(self, url: str, body: bytes) -> Answer: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Statistics:
    """Counts since the client was made; `open` is now.

    Every stream is either `tracked` (reports are sent) or `untracked` (the server gave no usable
    `X-TokenFlow-Stream`, or something in between encoded the body). Those whose reader reads on after the
    answer are `open` too.
    """

    open: int = 0
    tracked: int = 0
    untracked: int = 0
    sent: int = 0
    dropped: int = 0
    """Not delivered: no connection, too slow, a server error, too many. The next one has a newer position."""
    refused: int = 0
    """Refused for good (4xx); the stream is not reported on any more."""
    late: int = 0
    """The gateway had forgotten the stream already."""


class Reporter:
    """Owns the thread and the `Post`. Nothing here raises into a stream, and nothing waits but `close`."""

    def __init__(self, post: Callable[[], Post], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._make_post = post
        self._clock = clock
        self._lock = threading.Lock()
        self._look = threading.Event()
        self._tracks: set[Track] = set()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._not_before_s = 0.0
        self._failures = 0
        self._counts = Statistics()

    def follow(self, track: Track) -> None:
        """Report on this stream until it has ended and its reader with it."""
        with self._lock:
            if self._closing:
                return
            self._counts.tracked += 1
            self._tracks.add(track)
            if self._thread is None or not self._thread.is_alive():  # not alive: this is a forked process
                self._thread = threading.Thread(target=self._run, name="tokenflow-reports", daemon=True)
                self._thread.start()
        self._look.set()

    def not_followed(self) -> None:
        """A stream that cannot be reported on."""
        with self._lock:
            self._counts.untracked += 1

    def wake(self) -> None:
        """Look at the streams at once."""
        self._look.set()

    def statistics(self) -> Statistics:
        """A copy of the counts."""
        with self._lock:
            counts = Statistics(
                **{field.name: getattr(self._counts, field.name) for field in fields(Statistics)}
            )
            counts.open = len(self._tracks)
        return counts

    def close(self) -> None:
        """End all streams' reports, send what is due and stop. Blocks for `CLOSE_S` at most."""
        with self._lock:
            self._closing = True
            thread, tracks = self._thread, list(self._tracks)
        for track in tracks:
            track.end()
        self._look.set()
        if thread is not None and thread.is_alive():
            thread.join(CLOSE_S)

    # ---- the thread ----

    def _run(self) -> None:
        post = self._make_post()
        try:
            while tracks := self._wait():
                self._pass(post, tracks)
        finally:
            post.close()

    def _wait(self) -> list[Track]:
        """Wait until it is time to look; no tracks: the thread is to end."""
        if self._tracks or not self._closing:
            self._look.wait(TICK_S if self._tracks else LINGER_S)
            self._look.clear()
        with self._lock:
            if not self._tracks:
                self._thread = None
            return list(self._tracks)

    def _pass(self, post: Post, tracks: list[Track]) -> None:
        for track in tracks:
            now_s = self._clock()
            track.settle(now_s)
            ended = track.ended
            if track.due(now_s):
                if now_s >= self._not_before_s:
                    self._send(post, track, now_s)
                elif ended:
                    self._count("dropped")
            if ended:
                self._forget(track)

    def _send(self, post: Post, track: Track, now_s: float) -> None:
        report = track.report(now_s)
        body = {"capability": track.capability, "reports": [report.wire(now_s=self._clock())]}
        try:
            answer = post.send(track.url, json.dumps(body).encode())
        except Exception:  # noqa: BLE001 - whatever it was: reports must not matter to anything else
            self._failed()
            return
        if answer.status == 200:
            track.reported(report)
            self._failures = 0
            self._count("sent")
        else:
            self._not_accepted(track, answer)

    def _not_accepted(self, track: Track, answer: Answer) -> None:
        if answer.status in {404, 410}:
            self._forget(track)
            self._count("late")
        elif answer.status == 429:
            track.not_before_s = self._clock() + max(RETRY_S, min(answer.retry_after_s, MAX_RETRY_S))
            self._count("dropped")
        elif 400 <= answer.status < 500:
            self._forget(track)
            self._count("refused")
        else:
            self._failed()

    def _failed(self) -> None:
        pause_s = min(RETRY_S * 2**self._failures, MAX_RETRY_S)
        self._failures = min(self._failures + 1, 10)
        self._not_before_s = self._clock() + pause_s
        self._count("dropped")

    def _forget(self, track: Track) -> None:
        with self._lock:
            self._tracks.discard(track)

    def _count(self, what: str) -> None:
        with self._lock:
            setattr(self._counts, what, getattr(self._counts, what) + 1)
