"""One part after the other is killed while people go on asking: what that costs them, and for how long.

Each part is started again, and everything normal, before the next one goes. Which streams a part had is read
in the logs of those in front of it, afterwards.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.topology import Part, Topology, needs_topology, topology
from support.topology_load import DONE, SteadyLoad, Stream, engines_of, gateways_of, metric, note, until

pytestmark = [*needs_topology, pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS_PER_S = 40.0
LENGTHS = range(32, 96, 4)
"""Of the clients' streams, in tokens: all different, so that they are never all at their beginning."""
UNDISTURBED = 2 * len(LENGTHS)
"""Streams, read whole, that tell what is usual, or that it is so again."""
LIMITS = {"tenants": {"anonymous": {"limits": {"requests_per_minute": 100_000, "concurrent_streams": 1000}}}}
"""Never reached; but every request asks Redis."""
LATE_S = 0.3
"""A first event is late after that, or after twice what is usual: for the report."""
WAIT_S = 2.5
"""That nobody has to wait, on a machine as busy as it may be."""


@dataclass(frozen=True)
class Episode:
    """A part is gone at `gone_at`, by the monotonic clock, and takes part again `back_s` after its start."""

    what: str
    gone_at: float
    back_s: float
    streams: list[Stream]
    """That were under way then, or were asked for until it was back and all was as usual."""
    usual_s: float
    """The longest that a first event took before."""

    @property
    def under_way(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.sent < self.gone_at]

    @property
    def lost(self) -> list[Stream]:
        return [stream for stream in self.under_way if not stream.whole]

    @property
    def later(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.sent >= self.gone_at]

    @property
    def failed(self) -> list[Stream]:
        """Asked for after it was gone."""
        return [stream for stream in self.later if not stream.whole]

    @property
    def normal_after_s(self) -> float:
        """Until the last one was asked for that failed, or whose first event was late."""
        late_s = max(LATE_S, 2 * self.usual_s)
        late = [stream.sent for stream in self.later if not stream.whole or stream.first_s > late_s]
        return max(late, default=self.gone_at) - self.gone_at

    @property
    def slowest_s(self) -> float:
        """The longest that a first event took once the part was gone."""
        return max(stream.first_s for stream in self.later)

    def line(self) -> str:
        lost = f"{len(self.lost)} of {len(self.under_way)} | {len(self.failed)} of {len(self.later)}"
        seconds = (self.usual_s, self.slowest_s, self.normal_after_s, self.back_s)
        times = " | ".join(f"{value:.2f} s" for value in seconds)
        return f"| {self.what} | {lost} | {times} |"


async def episode(
    load: SteadyLoad,
    what: str,
    go: Callable[[], Awaitable[object]],
    come_back: Callable[[], Awaitable[object]],
    until_back: Callable[[], Awaitable[object]],
) -> Episode:
    """`until_back` ends when the part takes part again."""
    usual_s = max(stream.first_s for stream in await load.more(UNDISTURBED))
    gone_at = time.monotonic()
    await go()
    await load.more(UNDISTURBED)
    started_at = time.monotonic()
    await come_back()
    await until_back()
    back_s = time.monotonic() - started_at
    await load.more(UNDISTURBED)
    streams = [stream for stream in load.streams if stream.ended is not None and stream.ended > gone_at]
    return Episode(what, gone_at, back_s, streams, usual_s)


async def test_one_part_after_the_other(tmp_path: Path) -> None:
    async with (
        topology(tmp_path, tokens_per_s=TOKENS_PER_S, settings=LIMITS) as running,
        running.proxy.client() as client,
    ):
        gateway, engine, redis = running.gateways[0], running.engines[0], running.redis
        async with SteadyLoad.of(client, LENGTHS) as load:
            without_gateway = await episode(
                load,
                "gateway",
                lambda: gateway.end(signal.SIGKILL),
                gateway.start,
                lambda: until(lambda: has_streams(gateway)),
            )
            without_engine = await episode(
                load,
                "engine",
                lambda: engine.end(signal.SIGKILL),
                engine.start,
                lambda: until(lambda: engine_has_streams(running, engine)),
            )
            without_redis = await episode(
                load,
                "Redis",
                lambda: asyncio.to_thread(redis.kill),
                lambda: asyncio.to_thread(redis.start),
                lambda: until(lambda: all_have_redis(running)),
            )
            hanging_redis = await episode(
                load,
                "Redis, hanging",
                lambda: asyncio.to_thread(redis.suspend),
                lambda: asyncio.to_thread(redis.resume),
                lambda: until(lambda: all_have_redis(running)),
            )
            redis_lost = [await metric(part, "tokenflow_redis_lost_total") for part in running.gateways]
        by_gateway, by_engine = gateways_of(running.proxy), engines_of(running.gateways)
    episodes = [without_gateway, without_engine, without_redis, hanging_redis]
    for one in episodes:
        note(one.line())
    assert {by_gateway[stream.name] for stream in without_gateway.lost} == {address(gateway)}
    assert all(stream.broken for stream in without_gateway.lost), "no client may take it for an end"
    assert {by_engine[stream.name] for stream in without_engine.lost} == {engine.name}
    assert all(stream.text.rstrip().endswith(DONE) for stream in without_engine.lost)
    assert without_redis.lost == hanging_redis.lost == []
    assert min(redis_lost) >= 2, "both gateways have noticed, twice"
    for one in episodes:
        assert one.failed == [], "who asks once a part is gone gets an answer"
        assert one.slowest_s < WAIT_S, "and at once; from a silent Redis nothing is waited for but a second"
    lost = {*without_gateway.lost, *without_engine.lost}
    assert [stream.name for stream in load.streams if not stream.whole and stream not in lost] == []
    # Control: there was more to lose than what was.
    assert {by_gateway[stream.name] for stream in without_gateway.under_way} == set(
        map(address, running.gateways)
    )
    assert {by_engine[stream.name] for stream in without_engine.under_way} == {
        e.name for e in running.engines
    }


def address(part: Part) -> str:
    return part.url.removeprefix("http://")


async def on_engines(gateway: Part) -> set[str]:
    """Names of the engines that this gateway has streams on."""
    async with gateway.client() as client:
        listed = (await client.get("/admin/streams")).json()["streams"]
    return {stream["engine"] for stream in listed}


async def has_streams(gateway: Part) -> bool:
    return bool(await on_engines(gateway))


async def engine_has_streams(running: Topology, engine: Part) -> bool:
    return all([engine.name in await on_engines(gateway) for gateway in running.gateways])


async def all_have_redis(running: Topology) -> bool:
    return all([await metric(gateway, "tokenflow_redis_up") == 1.0 for gateway in running.gateways])
