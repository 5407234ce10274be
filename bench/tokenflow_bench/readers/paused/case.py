"""One case: all streams open at once, and what gateway and readers do meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from tokenflow_bench.processes import Program, get_json
from tokenflow_bench.readers.paused.clients import ReportSender, StreamClient, all_of
from tokenflow_bench.readers.paused.measure import Gaps, Usage, per_event_us, per_stream_kib
from tokenflow_bench.readers.paused.plan import OPENED_PER_S, Case, PausedRun

__all__ = ["measure_case"]

_SMALL_BUFFER_BYTES = 4096
_SIGN_OF_LIFE_S = 5.0
"""The gateway takes a pause as over after 15 s without a report."""
_REPORTS_PER_S = 400.0
_SENDERS = 4
_WARM_UP = 50
"""Streams opened and closed before, so that what is made only once is not counted as theirs."""
_NOTHING = Usage(cpu_s=0.0, wall_s=0.0)


async def measure_case(how: PausedRun, case: Case, *, engine: Program, served: Program) -> dict[str, Any]:
    """All streams open for the window: the case's figures. Raises `RuntimeError` if one is lost."""
    async with _open_streams(_WARM_UP, served, small=0):
        pass
    await _until_idle(served)
    idle_bytes = served.resident_bytes
    async with _open_streams(how.streams, served, small=how.stopped) as clients:
        async with _pausing(how, clients, served) if case.pauses else _reading():
            await asyncio.sleep(how.settle_s)
            figures = await _watch(how, clients, engine=engine, served=served)
            memory = per_stream_kib(
                idle_bytes=idle_bytes, open_bytes=served.resident_bytes, streams=how.streams
            )
            stopped = _unread(served, clients[: how.stopped]) if case.pauses else None
        report_us = await _report_cost(how, clients, served) if case.costs_reports else None
        lost = sum(client.lost for client in clients)
    if lost:
        raise RuntimeError(f"{lost} streams were lost")
    return {
        **figures,
        "idle_mib": idle_bytes / 2**20,
        "kib_per_stream": memory,
        "unread_tokens_per_stopped": stopped,
        "report_us": report_us,
    }


@asynccontextmanager
async def _open_streams(count: int, served: Program, *, small: int) -> AsyncIterator[list[StreamClient]]:
    """So many, opened evenly, all with their first token; the first `small` with a small receive buffer."""
    clients: list[StreamClient] = []
    begun = time.monotonic()
    try:
        for number in range(count):
            client = StreamClient(served.url, model=f"stream-{number}")
            buffer_bytes = _SMALL_BUFFER_BYTES if number < small else None
            clients.append(await client.connect(receive_buffer_bytes=buffer_bytes))
            await asyncio.sleep(max(begun + (number + 1) / OPENED_PER_S - time.monotonic(), 0.0))
        await all_of((client.answered for client in clients), within_s=30)
        yield clients
    finally:
        for client in clients:
            client.close()


@asynccontextmanager
async def _reading() -> AsyncIterator[None]:
    """Everyone reads."""
    yield


@asynccontextmanager
async def _pausing(how: PausedRun, clients: Sequence[StreamClient], served: Program) -> AsyncIterator[None]:
    """The first ones stop reading their sockets, the next ones read on and say that they have paused."""
    for client in clients[: how.stopped]:
        client.stop_reading()
    saying = asyncio.create_task(_say_paused(clients[how.stopped : how.pausing], served))
    try:
        yield
    finally:
        saying.cancel()
        with suppress(asyncio.CancelledError):
            await saying


async def _say_paused(clients: Sequence[StreamClient], served: Program) -> None:
    """At once, and again before the gateway takes the pause for over."""
    while True:
        begun = time.monotonic()
        async with ReportSender(served.url) as sender:
            for client in clients:
                await sender.send(client, paused=True)
        await asyncio.sleep(max(begun + _SIGN_OF_LIFE_S - time.monotonic(), 0.0))


async def _watch(
    how: PausedRun, clients: Sequence[StreamClient], *, engine: Program, served: Program
) -> dict[str, Any]:
    """Everybody's CPU time, and the gaps of those who never pause, over the window."""
    others = clients[how.pausing :]
    before = _Clocks.now(engine, served)
    tokens = sum(client.tokens for client in clients)
    for client in others:
        client.recording = True
    await asyncio.sleep(how.window_s)
    for client in others:
        client.recording = False
    after = _Clocks.now(engine, served)
    passed = sum(client.tokens for client in clients) - tokens
    usage = {name: after.since(before, name) for name in ("gateway", "engine", "clients")}
    return {
        "cpu_share": {name: one.share for name, one in usage.items()},
        "waited_share": after.since(before, "waited").share,
        "tokens_per_s": passed / usage["gateway"].wall_s,
        "gateway_us_per_received_token": 1e6 * usage["gateway"].cpu_s / passed,
        "gaps": asdict(Gaps.of([gap for client in others for gap in client.gaps_s])),
    }


async def _report_cost(how: PausedRun, clients: Sequence[StreamClient], served: Program) -> float:
    """CPU time of one progress report beyond that of the streams: without, with, without, with."""
    without, with_them, reports = _NOTHING, _NOTHING, 0
    for _ in range(2):
        before = _Clocks.now(served, served)
        await asyncio.sleep(how.window_s / 4)
        between = _Clocks.now(served, served)
        reports += await _report_all(clients, served, seconds=how.window_s / 4)
        after = _Clocks.now(served, served)
        without += between.since(before, "gateway")
        with_them += after.since(between, "gateway")
    return per_event_us(without, with_them, events=reports)


async def _report_all(clients: Sequence[StreamClient], served: Program, *, seconds: float) -> int:
    """Reports of all of them in turn, over a few connections; how many."""

    async def report(some: Sequence[StreamClient]) -> int:
        async with ReportSender(served.url) as sender:
            return await sender.send_for(some, per_s=_REPORTS_PER_S / _SENDERS, seconds=seconds)

    return sum(await asyncio.gather(*(report(clients[number::_SENDERS]) for number in range(_SENDERS))))


@dataclass(frozen=True)
class _Clocks:
    """CPU time of each process so far, what the gateway has waited for its core, and the time."""

    at_s: float
    waited: float
    gateway: float
    engine: float
    clients: float

    @classmethod
    def now(cls, engine: Program, served: Program) -> _Clocks:
        return cls(time.monotonic(), served.waited_s, served.cpu_s, engine.cpu_s, time.process_time())

    def since(self, before: _Clocks, name: str) -> Usage:
        return Usage(cpu_s=getattr(self, name) - getattr(before, name), wall_s=self.at_s - before.at_s)


def _unread(served: Program, clients: Sequence[StreamClient]) -> float:
    """Tokens the gateway has for each of these that are not read, as it says itself."""
    wanted = {client.answered.result()[0] for client in clients}
    listed = get_json(f"{served.url}/admin/streams")["streams"]
    buffered: list[float] = [stream["buffered"] for stream in listed if stream["id"] in wanted]
    return sum(buffered) / len(buffered)


async def _until_idle(served: Program) -> None:
    async with asyncio.timeout(20):
        while await asyncio.to_thread(_open_now, served):  # noqa: ASYNC110 - it tells only when asked
            await asyncio.sleep(0.1)


def _open_now(served: Program) -> int:
    total: int = get_json(f"{served.url}/admin/streams")["total"]
    return total
