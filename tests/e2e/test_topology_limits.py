"""Limits hold over two gateways as if they were one, for many clients at once, through the proxy.

Everything runs as processes; what was let through is counted by the clients, and by the gateways beside them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from support.topology import Topology, needs_topology, topology
from support.topology_load import CHAT, Load, SteadyLoad, Stream, metric, note, until

pytestmark = needs_topology

TOKENS_PER_S = 40.0
REQUESTS, STREAMS = 100, 12
MINUTE_S = 60.0


@asynccontextmanager
async def limited(
    folder: Path, *, shared: bool = True, **limits: int
) -> AsyncIterator[tuple[Topology, httpx.AsyncClient]]:
    settings = {"tenants": {"anonymous": {"limits": limits}}}
    async with (
        topology(folder, tokens_per_s=TOKENS_PER_S, settings=settings, shared=shared) as running,
        running.proxy.client() as client,
    ):
        yield running, client


async def requests(client: httpx.AsyncClient, count: int, *, at_once: int = 50) -> list[Stream]:
    """So many short streams, by clients that ask for the next when they have one."""
    streams = [Stream(f"request-{number}") for number in range(count)]
    left = iter(streams)

    async def one_after_the_other() -> None:
        for stream in left:
            await stream.read(client, tokens=1)

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return streams


def let_through(streams: Iterable[Stream]) -> list[Stream]:
    """Those that were; the others were refused, each for a limit, or something is wrong."""
    streams = list(streams)
    refused = [stream for stream in streams if stream.status == 429]
    assert {stream.reason for stream in refused} <= {"requests", "streams"}
    assert len(refused) + sum(stream.whole for stream in streams) == len(streams)
    return [stream for stream in streams if stream.status == 200]


async def by_gateway(running: Topology, name: str) -> list[int]:
    return [int(await metric(gateway, name)) for gateway in running.gateways]


async def test_requests_a_minute_are_exact_over_both(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_minute=REQUESTS) as (running, client):
        began = time.monotonic()
        streams = await requests(client, 260)
        took_s = time.monotonic() - began
        assert took_s < MINUTE_S, "all in one minute, or this says nothing"
        assert len(let_through(streams)) == REQUESTS
        turned_away = await by_gateway(running, 'tokenflow_rejected_total{reason="requests"}')
        assert sum(turned_away) == 160
        assert await by_gateway(running, "tokenflow_redis_lost_total") == [0, 0]
        shares = await shares_of(running, REQUESTS)
        assert sum(shares) == REQUESTS
        assert min(shares) > REQUESTS / 5, "both let some through"
        note(f"| requests a minute | {REQUESTS} | {sum(shares)} of 260 in {took_s:.1f} s; {shares} |")


async def test_control_without_redis_each_gateway_lets_the_whole_limit_through(tmp_path: Path) -> None:
    async with limited(tmp_path, shared=False, requests_per_minute=REQUESTS) as (running, client):
        streams = await requests(client, 300)
        assert len(let_through(streams)) == 2 * REQUESTS
        assert await shares_of(running, 2 * REQUESTS) == [REQUESTS, REQUESTS]
        note(f"| the same without Redis | {REQUESTS} | {2 * REQUESTS} of 300 |")


async def shares_of(running: Topology, count: int) -> list[int]:
    """Streams that each gateway has let through, once `count` of them have ended."""
    name = 'tokenflow_tenant_streams_ended_total{reason="finished",tenant="anonymous"}'

    async def have_ended() -> bool:
        return sum(await by_gateway(running, name)) >= count

    await until(have_ended)
    return await by_gateway(running, name)


async def test_streams_at_a_time_are_exact_over_both(tmp_path: Path) -> None:
    """So many from all who ask at once; later, with more clients than may, hardly a place is ever free."""
    async with limited(tmp_path, concurrent_streams=STREAMS) as (running, client):
        at_once = await Load.of(client, 3 * STREAMS, tokens=40)
        assert Counter(stream.status for stream in at_once.streams.values()) == {
            200: STREAMS,
            429: 2 * STREAMS,
        }
        await at_once.end()
        async with SteadyLoad.of(client, [160] * (STREAMS + 6)) as load:
            first = await load.more(STREAMS)
            since = max(heard(stream)[0] for stream in first)
            await load.more(2 * STREAMS)
            until = time.monotonic()
        streams = let_through(load.streams)
        most = most_at_once(streams)
        used = occupied_s(streams, since, until) / (STREAMS * (until - since))
        lost = await by_gateway(running, "tokenflow_redis_lost_total")
        assert (most, lost) == (STREAMS, [0, 0])
        assert used >= 0.98
        note(
            f"| streams at a time | {STREAMS} | at most {most}, {used:.1%} taken for {until - since:.0f} s |"
        )


def most_at_once(streams: Iterable[Stream]) -> int:
    """How many were open at a time, at least: from the first event to the last."""
    changes = [change for stream in streams for change in ((heard(stream)[0], 1), (heard(stream)[1], -1))]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def occupied_s(streams: Iterable[Stream], since: float, until: float) -> float:
    """For how long they were open in that time, at least; all together."""
    spans = (heard(stream) for stream in streams)
    return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in spans)


def heard(stream: Stream) -> tuple[float, float]:
    return stream.sent + stream.at_s[0], stream.sent + stream.at_s[-1]


async def test_control_without_redis_twice_as_many_streams_run(tmp_path: Path) -> None:
    """And reports that come to the gateway without the stream go to nobody."""
    async with limited(tmp_path, shared=False, concurrent_streams=STREAMS) as (_, client):
        load = await Load.of(client, 3 * STREAMS, tokens=80)
        statuses = Counter(stream.status for stream in load.streams.values())
        assert statuses == {200: 2 * STREAMS, 429: STREAMS}
        await load.end()
        note(f"| the same without Redis | {STREAMS} | {2 * STREAMS} of {3 * STREAMS} |")
        assert await report_beside_a_stream(client) == 403


async def report_beside_a_stream(client: httpx.AsyncClient) -> int:
    """What a progress report is answered that the proxy sends to the other gateway."""
    body = {"model": "recorded", "stream": True, "max_tokens": 80, "messages": []}
    async with client.stream("POST", CHAT, json=body) as answer:
        rid, _, capability = answer.headers["x-tokenflow-stream"].partition(".")
        await anext(answer.aiter_raw())
        report = {"capability": capability, "reports": [{"seq": 0, "tokens": 1}]}
        return (await client.post(f"/v1/streams/{rid}/progress", json=report)).status_code


@pytest.mark.skipif(
    os.environ.get("TOKENFLOW_THOROUGH") != "1", reason="two minutes: with TOKENFLOW_THOROUGH=1"
)
@pytest.mark.timeout(300)
async def test_no_minute_has_more_and_two_have_hardly_less(tmp_path: Path) -> None:
    """Half again as many requests as may, evenly, for two minutes of the limit (60.5 s each)."""
    limit, seconds = 600, 2 * MINUTE_S + 1
    async with limited(tmp_path, requests_per_minute=limit) as (_, client):
        began = time.monotonic()
        async with asyncio.TaskGroup() as asked:
            tasks = []
            for number in range(int(1.5 * limit * seconds / MINUTE_S)):
                due = began + number * MINUTE_S / (1.5 * limit)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.append(asked.create_task(Stream(f"r-{number}").read(client, tokens=1)))
            seconds = time.monotonic() - began
        streams = let_through(task.result() for task in tasks)
        most = most_in_a_minute(streams)
        assert most <= limit
        share = len(streams) / (limit * seconds / MINUTE_S)
        assert share >= 0.98
        note(f"| requests a minute | {limit} | at most {most} in 60 s, {share:.1%} over {seconds:.0f} s |")


def most_in_a_minute(streams: Iterable[Stream]) -> int:
    """Let through in any 60 seconds, at least: asked for after their beginning, answered before their end."""
    streams = sorted(streams, key=lambda stream: stream.sent)
    return max(
        sum(
            other.sent >= first.sent and other.sent + other.first_s <= first.sent + MINUTE_S
            for other in streams
        )
        for first in streams
    )
