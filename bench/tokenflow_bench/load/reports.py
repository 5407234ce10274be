"""Progress reports of one reader to TokenFlow's gateway (docs/progress.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tokenflow_bench.load.answer import Answer
from tokenflow_bench.load.http import Posts

__all__ = ["Reporter"]

_PAUSE_REPEAT_S = 5.0
"""A pause without any report for 15 s is over to the gateway."""


class Reporter:
    """Reports every `every_s` seconds, and at both ends of a pause."""

    def __init__(self, answer: Answer, posts: Posts, *, start_s: float, every_s: float) -> None:
        self._answer = answer
        self._posts = posts
        self._start_s = start_s
        self._every_s = every_s
        self._seq = 0

    async def run(self, *, says_pauses: bool) -> None:
        """Until cancelled; with `says_pauses` it tells of them, otherwise it only stops moving in one."""
        for at, paused in self._times():
            await asyncio.sleep(max(at - self._now(), 0.0))
            self._report(paused=paused and says_pauses)

    def _times(self) -> Iterator[tuple[float, bool]]:
        """When to report, and whether the person pauses then."""
        at = self._answer.log.token_s[0]
        for begin, end in [*self._edges(), (float("inf"), float("inf"))]:
            while at + self._every_s < begin:
                at += self._every_s
                yield at, False
            at = begin
            while at < end:
                yield at, True
                at += min(_PAUSE_REPEAT_S, end - at)
            yield at, False

    def _edges(self) -> list[tuple[float, float]]:
        first_s = self._answer.log.token_s[0]
        return [(first_s + begin, first_s + end) for begin, end in self._answer.log.person.pauses()]

    def _report(self, *, paused: bool) -> None:
        report: dict[str, Any] = {"seq": self._seq, "tokens": self._answer.reading.read_by(self._now())}
        if paused:
            report["paused"] = True
        self._seq += 1
        body = {"capability": self._answer.capability, "reports": [report]}
        route = f"/v1/streams/{self._answer.log.stream}/progress"
        self._posts.post(route, msgspec.json.encode(body))

    def _now(self) -> float:
        return time.monotonic() - self._start_s
