"""Two tenants in a burst on the real engine: who is promised more gets it; forged headers change nothing."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.gateway import RunningGateway, eventually, running_gateway
from support.keys import make_key
from support.real_engine import RealEngine
from tokenflow_gateway.tenants.keys import NewKey

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
PLACES = 12
"""Of the engine."""
TOKENS = 160
BRONZE, GOLD = 48, 8
TENANTS = {"gold": {"classes": ["gold"]}, "bronze": {"classes": ["bronze"]}}
GREEDY = {
    "x-tokenflow-sla": "gold",
    "x-tokenflow-ttft-ms": "1",
    "x-smg-priority": "system",
    "x-dynamo-request-priority": "2147483647",
    "x-llm-d-slo-ttft-ms": "1",
    "x-llm-d-slo-tpot-ms": "1",
}


@dataclass
class Told:
    """One stream as its client saw it. Times in seconds."""

    ttft_s: float = math.inf
    tokens: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)


@dataclass(frozen=True)
class Burst:
    """What a run has shown."""

    gold: list[Told]
    bronze: list[Told]
    seconds: float
    granted: set[tuple[float, float, float | None]]
    """Weight, target and rate of bronze's streams, as they were told to the engine."""

    def __str__(self) -> str:
        lines = []
        for name, told in (("gold", self.gold), ("bronze", self.bronze)):
            ttfts = sorted(one.ttft_s for one in told)
            lines.append(f"{name}: TTFT median {statistics.median(ttfts):.2f} s, longest {ttfts[-1]:.2f} s")
        tokens = sum(one.tokens for one in (*self.gold, *self.bronze))
        return "; ".join([*lines, f"{tokens / self.seconds:.0f} tokens/s in {self.seconds:.1f} s"])


def asks(number: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": f"request {number}"}],
    }


async def read(client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> Told:
    told, begun = Told(), time.monotonic()
    async with client.stream("POST", CHAT, json=body, headers=headers, timeout=200) as answer:
        assert answer.status_code == 200, await answer.aread()
        told.headers = answer.headers
        async for line in answer.aiter_lines():
            if told.ttft_s == math.inf and '"content":"' in line and '"content":""' not in line:
                told.ttft_s = time.monotonic() - begun
            if '"completion_tokens":' in line:
                told.tokens = int(line.split('"completion_tokens":')[1].split(",")[0].rstrip("}"))
    return told


async def full_batch_s(engine: RealEngine) -> float:
    """How long the engine takes now for as many streams as it has places, without us."""
    async with httpx.AsyncClient(base_url=engine.base_url, trust_env=False) as client:
        await read(client, asks(0), {})
        begun = time.monotonic()
        await asyncio.gather(*(read(client, asks(100 + number), {}) for number in range(PLACES)))
        return time.monotonic() - begun


async def burst(
    gateway: RunningGateway, gold: NewKey, bronze: NewKey, *, every_s: float, forged: dict[str, Any]
) -> Burst:
    """All of bronze at once; gold one after another once the engine has its hands full."""
    (engine,) = gateway.app.registry
    granted = set()

    async def ask(made: NewKey, number: int, more: dict[str, Any]) -> Told:
        body = asks(number) | more.get("body", {})
        headers = {"authorization": f"Bearer {made.text}", **more.get("headers", {})}
        return await read(gateway.client, body, headers)

    begun = time.monotonic()
    low = [asyncio.create_task(ask(bronze, number, forged)) for number in range(BRONZE)]
    await eventually(lambda: engine.stats is not None and engine.stats.waiting > 0, "some wait", timeout_s=60)
    granted |= {(s.grant.weight, s.grant.ttft_s, s.grant.declared_rate) for s in gateway.streams}
    high = []
    for number in range(GOLD):
        high.append(asyncio.create_task(ask(gold, 1000 + number, {})))
        await asyncio.sleep(every_s)  # when people come, not a condition
    told = Burst(await asyncio.gather(*high), await asyncio.gather(*low), time.monotonic() - begun, granted)
    await gateway.everything_released()
    return told


async def run(
    engine: RealEngine,
    state: Path,
    *,
    gold_tenant: str = "gold",
    forged: dict[str, Any] | None = None,
    admission: dict[str, Any] | None = None,
) -> tuple[Burst, float, float]:
    """The burst, gold's target, and what it may take if the machine has become slower since that was set.

    The target is the time of one full batch, of which the burst has more than four. Readers of bronze want
    twice what the engine gives, so that it is too much for it whatever it does.
    """
    target_s = await full_batch_s(engine)
    rate = 2 * PLACES * TOKENS / target_s / BRONZE
    classes = {
        "gold": {"weight": 8, "ttft_ms": 1000 * target_s},
        "bronze": {"weight": 1, "ttft_ms": 8000 * target_s, "max_rate": rate},
    }
    forged = forged or {"headers": {"x-tokenflow-rate": str(rate)}}
    gold, bronze = make_key(state, gold_tenant), make_key(state, "bronze")
    entry = {"url": engine.base_url, "id": "e", "link": engine.link}
    async with running_gateway(
        entry,
        state_dir=state,
        link_secret=engine.secret,
        classes=classes,
        tenants=TENANTS,
        admission=admission or {},
    ) as gateway:
        (one,) = gateway.app.registry
        await eventually(lambda: one.linked and one.stats is not None, "linked")
        told = await burst(gateway, gold, bronze, every_s=target_s / GOLD, forged=forged)
    allowed_s = max(target_s, await full_batch_s(engine))
    print(f"target {target_s:.2f} s, {allowed_s:.2f} at the machine's pace now; {told}")  # noqa: T201 - the point
    assert all(stream.tokens == TOKENS for stream in (*told.gold, *told.bronze)), "nobody starves"
    return told, target_s, allowed_s


def ttfts(streams: Sequence[Told]) -> list[float]:
    return [stream.ttft_s for stream in streams]


FORGED = {"headers": {**GREEDY, "x-tokenflow-rate": "1000"}, "body": {"priority": 2147483647}}


@pytest.mark.parametrize("forged", [None, FORGED], ids=["honest", "forged"])
async def test_gold_is_in_time_and_bronze_degrades_in_its_own_class(
    tiny_engine: RealEngine, tmp_path: Path, forged: dict[str, Any] | None
) -> None:
    told, target_s, allowed_s = await run(tiny_engine, tmp_path, forged=forged)
    assert max(ttfts(told.gold)) <= allowed_s
    assert statistics.median(ttfts(told.bronze)) > statistics.median(ttfts(told.gold))
    assert {stream.headers["x-tokenflow-sla"] for stream in told.gold} == {"gold"}
    assert {stream.headers["x-tokenflow-sla"] for stream in told.bronze} == {"bronze"}
    (granted,) = told.granted
    assert granted[:2] == pytest.approx((1.0, 8 * target_s))
    reduced = {stream.headers.get("x-tokenflow-reduced") for stream in told.bronze}
    assert reduced == {"sla, ttft, rate, priority" if forged else None}


async def test_with_a_key_of_bronze_gold_would_wait_like_all(tiny_engine: RealEngine, tmp_path: Path) -> None:
    """The negative control: the same burst, all of one tenant and class."""
    told, _, allowed_s = await run(tiny_engine, tmp_path, gold_tenant="bronze")
    assert max(ttfts(told.gold)) > allowed_s
