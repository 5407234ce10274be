"""Two tenants in a burst on the real engine: who is promised more gets it; forged headers change nothing."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.gateway import RunningGateway, eventually, running_gateway
from support.keys import make_key
from support.real_engine import RealEngine
from tokenflow_gateway.tenants.keys import NewKey

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHAT = "/v1/chat/completions"
TOKENS = 160
TARGET_S = 1.5
CLASSES = {
    "gold": {"weight": 8, "ttft_ms": 1000 * TARGET_S},
    "bronze": {"weight": 1, "ttft_ms": 30_000, "max_rate": 10},
}
TENANTS = {"gold": {"classes": ["gold"]}, "bronze": {"classes": ["bronze"]}}
GREEDY = {
    "x-tokenflow-sla": "gold",
    "x-tokenflow-ttft-ms": "1",
    "x-tokenflow-rate": "1000",
    "x-smg-priority": "system",
    "x-dynamo-request-priority": "2147483647",
    "x-llm-d-slo-ttft-ms": "1",
}
BRONZE, GOLD = 48, 8


@dataclass(frozen=True)
class Told:
    """One stream as its client saw it. Times in seconds."""

    ttft_s: float
    tokens: int
    sla: str | None


async def ask(
    gateway: RunningGateway, made: NewKey, number: int, *, after_s: float, headers: dict[str, str]
) -> Told:
    await asyncio.sleep(after_s)  # when people come, not a condition
    body = {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": f"request {number}"}],
    }
    begun, first, tokens = time.monotonic(), None, 0
    headers = {"authorization": f"Bearer {made.text}", **headers}
    async with gateway.client.stream("POST", CHAT, json=body, headers=headers, timeout=90) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if first is None and '"content":"' in line and '"content":""' not in line:
                first = time.monotonic()
            if '"completion_tokens":' in line:
                tokens = int(line.split('"completion_tokens":')[1].split(",")[0].rstrip("}"))
        assert first is not None
        return Told(first - begun, tokens, answer.headers.get("x-tokenflow-sla"))


async def burst(
    gateway: RunningGateway, gold: NewKey, bronze: NewKey, forged: dict[str, str]
) -> tuple[list[Told], list[Told]]:
    """All of bronze at once, and gold one after another into it."""
    low = [ask(gateway, bronze, n, after_s=0.0, headers=forged) for n in range(BRONZE)]
    high = [ask(gateway, gold, 1000 + n, after_s=0.3 + 0.2 * n, headers={}) for n in range(GOLD)]
    told = await asyncio.gather(*high, *low)
    await gateway.everything_released()
    return told[:GOLD], told[GOLD:]


def ttfts(streams: Iterable[Told]) -> list[float]:
    return sorted(stream.ttft_s for stream in streams)


async def run(
    engine: RealEngine, state: Path, *, gold_tenant: str = "gold", forged: dict[str, str]
) -> tuple[list[Told], list[Told]]:
    gold, bronze = make_key(state, gold_tenant), make_key(state, "bronze")
    entry = {"url": engine.base_url, "id": "e", "link": engine.link}
    async with running_gateway(
        entry, state_dir=state, link_secret=engine.secret, classes=CLASSES, tenants=TENANTS
    ) as gateway:
        (one,) = gateway.app.registry
        await eventually(lambda: one.linked and one.stats is not None, "linked")
        high, low = await burst(gateway, gold, bronze, forged)
    print(  # noqa: T201 - the figures are the point
        f"gold p50 {statistics.median(ttfts(high)):.2f} max {ttfts(high)[-1]:.2f}, "
        f"bronze p50 {statistics.median(ttfts(low)):.2f} max {ttfts(low)[-1]:.2f}"
    )
    assert all(stream.tokens == TOKENS for stream in (*high, *low)), "nobody starves"
    return high, low


@pytest.mark.parametrize("forged", [{}, GREEDY], ids=["honest", "forged"])
async def test_gold_is_in_time_and_bronze_degrades_in_its_own_class(
    tiny_engine: RealEngine, tmp_path: Path, forged: dict[str, str]
) -> None:
    high, low = await run(tiny_engine, tmp_path, forged=forged)
    assert {stream.sla for stream in high} == {"gold"}
    assert {stream.sla for stream in low} == {"bronze"}
    assert ttfts(high)[-1] <= TARGET_S
    assert statistics.median(ttfts(low)) > statistics.median(ttfts(high))


async def test_with_a_key_of_bronze_gold_would_wait_like_all(tiny_engine: RealEngine, tmp_path: Path) -> None:
    """The negative control: the same burst, all of one tenant and class."""
    high, _ = await run(tiny_engine, tmp_path, gold_tenant="bronze", forged={})
    assert ttfts(high)[-1] > TARGET_S
