"""Sends requests when they are due and lets people read the answers.

An open loop: arrival times are fixed beforehand, and no answer, however late, holds up the next request.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tokenflow_bench.load.answer import Answer
from tokenflow_bench.load.http import Posts, Server, post_bytes
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.load.overhead import Overhead, OverheadMeter
from tokenflow_bench.load.reports import Reporter
from tokenflow_bench.reading import Person
from tokenflow_bench.sla import ONE_CLASS, Sla

__all__ = ["Ask", "Client", "Drive", "drive"]

PauseStyle = Literal["report", "stop", "silent"]
_SAY_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: `due_s` seconds after the start."""

    due_s: float
    prompt: str
    output_tokens: int
    person: Person
    sla: Sla = ONE_CLASS


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """How all requests of a run are made.

    `pauses`: readers who pause say so (`report`), stop reading the socket (`stop`), or leave no trace
    (`silent`).
    """

    url: str
    model: str
    route: Literal["/v1/chat/completions", "/v1/completions"] = "/v1/chat/completions"
    api_key: str | None = None
    declares_rate: bool = True
    people: Literal["human", "voice"] = "human"
    """They read, or listen."""
    report_every_s: float | None = None
    """Progress reports to TokenFlow's gateway; None for none."""
    pauses: PauseStyle = "silent"
    body: dict[str, Any] = field(default_factory=dict)
    """Fields added to each request."""

    def request(self, server: Server, ask: Ask) -> bytes:
        """As it goes over the wire."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": ask.output_tokens,
            "temperature": 0,
        }
        if self.route == "/v1/completions":
            body["prompt"] = ask.prompt
        else:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        return post_bytes(server, self.route, msgspec.json.encode(body | self.body), self._headers(ask))

    def _headers(self, ask: Ask) -> dict[str, str]:
        headers = {"Accept": "text/event-stream"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if ask.person.is_machine:
            headers["X-TokenFlow-Reader"] = "machine"
        elif self.people != "human":
            headers["X-TokenFlow-Reader"] = self.people
        if self.declares_rate and not ask.person.is_machine:
            headers["X-TokenFlow-Rate"] = f"{ask.person.rate:.3f}"
        if ask.sla.name != ONE_CLASS.name:
            headers["X-TokenFlow-SLA"] = ask.sla.name
            headers["X-TokenFlow-TTFT-Ms"] = f"{1000 * ask.sla.ttft_target_s:g}"
        return headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One run, over.

    `horizon_s` is when streams that were not at their end were given up, `start_s` what the monotonic clock
    said when the clock of the logs was at 0.
    """

    logs: list[StreamLog]
    start_s: float
    horizon_s: float
    overhead: Overhead
    report_statuses: dict[int, int]


async def drive(
    client: Client,
    asks: Sequence[Ask],
    *,
    horizon_s: float,
    say: Callable[[str], None] = lambda line: None,
) -> Drive:
    """Make all requests; returns when all answers are over, or at the horizon."""
    _allow_files(len(asks) + 64)
    run = _Run(client, asks)
    gc.collect()
    gc.freeze()  # a collection in the middle would be measured as lag
    try:
        return await run.run(horizon_s, say)
    finally:
        gc.unfreeze()


class _Run:
    def __init__(self, client: Client, asks: Sequence[Ask]) -> None:
        self._client = client
        self._server = Server.at(client.url)
        self._asks = asks
        self._requests = [client.request(self._server, ask) for ask in asks]
        self._start_s = 0.0
        self._answers: list[Answer] = []
        self._posts = Posts(self._server)

    async def run(self, horizon_s: float, say: Callable[[str], None]) -> Drive:
        self._start_s = time.monotonic()
        self._answers = [
            Answer(_log(index, ask), start_s=self._start_s) for index, ask in enumerate(self._asks)
        ]
        try:
            async with OverheadMeter() as meter:
                await self._all(horizon_s, say)
                logs = [answer.log for answer in self._answers]
                late = [log.begun_s - log.due_s for log in logs if log.begun_s is not None]
                overhead = meter.overhead(late)
        finally:
            await self._posts.close()
        return Drive(
            logs=logs,
            start_s=self._start_s,
            horizon_s=horizon_s,
            overhead=overhead,
            report_statuses=dict(self._posts.statuses),
        )

    async def _all(self, horizon_s: float, say: Callable[[str], None]) -> None:
        streams = [
            asyncio.create_task(self._stream(answer, request))
            for answer, request in zip(self._answers, self._requests, strict=True)
        ]
        saying = asyncio.create_task(self._say(say))
        try:
            async with asyncio.timeout(horizon_s):
                await asyncio.gather(*streams)
        except TimeoutError:
            pass
        finally:
            for answer in self._answers:
                if not answer.over.is_set():
                    answer.give_up()
            for task in [*streams, saying]:
                task.cancel()
            await asyncio.gather(*streams, saying, return_exceptions=True)

    async def _stream(self, answer: Answer, request: bytes) -> None:
        log = answer.log
        await asyncio.sleep(log.due_s - (time.monotonic() - self._start_s))
        log.begun_s = time.monotonic() - self._start_s
        try:
            await self._server.connect(answer)
        except OSError as error:
            answer.lost(f"cannot connect: {error}")
            return
        answer.send(request)
        log.sent_s = time.monotonic() - self._start_s
        await answer.begun.wait()
        if answer.over.is_set():
            return
        async with asyncio.TaskGroup() as beside:
            tasks = [beside.create_task(work) for work in self._beside(answer)]
            await answer.over.wait()
            for task in tasks:
                task.cancel()

    def _beside(self, answer: Answer) -> list[Any]:
        """What goes on while the answer comes."""
        work: list[Any] = []
        every_s = self._client.report_every_s
        if every_s is not None and answer.capability is not None and not answer.log.person.is_machine:
            reporter = Reporter(answer, self._posts, start_s=self._start_s, every_s=every_s)
            work.append(reporter.run(says_pauses=self._client.pauses == "report"))
        if self._client.pauses == "stop" and answer.log.person.spans:
            work.append(self._stop_and_go(answer))
        return work

    async def _stop_and_go(self, answer: Answer) -> None:
        """Do not read the socket in pauses."""
        first_s = answer.log.token_s[0]
        for begin, end in answer.log.person.pauses():
            await asyncio.sleep(first_s + begin - (time.monotonic() - self._start_s))
            if answer.transport is None:
                return
            answer.transport.pause_reading()
            await asyncio.sleep(first_s + end - (time.monotonic() - self._start_s))
            if answer.transport is not None:
                answer.transport.resume_reading()

    async def _say(self, say: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(_SAY_EVERY_S)
            begun = sum(bool(answer.log.token_s) for answer in self._answers)
            over = sum(answer.over.is_set() for answer in self._answers)
            now = time.monotonic() - self._start_s
            say(f"{now:4.0f} s: {begun} of {len(self._answers)} begun, {over} over")


def _log(index: int, ask: Ask) -> StreamLog:
    return StreamLog(
        index=index, due_s=ask.due_s, person=ask.person, output_tokens=ask.output_tokens, sla=ask.sla
    )


def _allow_files(count: int) -> None:
    """A socket each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard) if hard >= 0 else count, hard))
