"""Every client through the gateway, in front of the real engine with the plugin: what `make compat` adds."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from compat.cases import Record, can
from compat.clients import ClientProcess
from compat.features import FEATURES, LEAVES, Feature
from compat.load import aiperf
from compat.matrix import ENGINE
from support.gateway import RunningGateway, eventually, running_gateway
from support.real_engine import RealEngine, tokenflow_home

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif("TOKENFLOW_COMPAT_RESULTS" not in os.environ, reason="`make compat` runs it"),
]

TABLE = "real"
MODEL = "smollm2-135m"
PATIENCE_S = 10.0
ARGS = [
    *("--served-model-name", MODEL),
    *("--tool-call-parser", "qwen25"),
    "--constrained-json-disable-any-whitespace",
    *("--max-total-tokens", "16384"),
    *("--max-running-requests", "8"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[RealEngine]:
    with RealEngine(tokenflow_home() / "models" / "SmolLM2-135M-Instruct", args=ARGS) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engine: RealEngine) -> AsyncIterator[RunningGateway]:
    target = {"url": engine.base_url, "id": "real", "link": engine.link}
    async with running_gateway(target, link_secret=engine.secret) as gateway:
        await engine_is_idle(gateway)
        yield gateway


async def engine_is_idle(gateway: RunningGateway) -> None:
    """Wait until the link is up and the engine has nothing to do, by its own word."""
    (engine,) = gateway.app.registry
    await eventually(
        lambda: (
            engine.linked and engine.stats is not None and engine.stats.running + engine.stats.waiting == 0
        ),
        "the engine is idle",
        timeout_s=PATIENCE_S,
    )


class _Known(NamedTuple):
    name: str
    version: str


async def test_which_engine_it_is(gateway: RunningGateway, record: Record) -> None:
    """By its plugin's word."""
    (engine,) = gateway.app.registry
    assert engine.welcome is not None
    record(_Known(ENGINE, engine.welcome.engine), "linked", ENGINE)


@can(*(feature for feature in FEATURES if feature.real))
async def test_feature(
    client: ClientProcess, feature: Feature, gateway: RunningGateway, record: Record
) -> None:
    record(client, feature.name, TABLE)
    outcome = await client.ask(f"{gateway.base_url}/v1", feature.request(MODEL), op=feature.op)
    (feature.check_real or feature.check)(outcome)


@can(LEAVES)
async def test_a_user_who_leaves(
    client: ClientProcess, feature: Feature, gateway: RunningGateway, record: Record
) -> None:
    """A long answer, of which nobody reads more than two chunks: the engine is idle long before its end."""
    record(client, feature.name, TABLE)
    body = feature.request(MODEL) | {"max_tokens": 4000}
    body["messages"] = [{"role": "user", "content": "Tell me a long story."}]
    await client.ask(f"{gateway.base_url}/v1", body, leave_after=2)
    await engine_is_idle(gateway)
    await gateway.everything_released()


async def test_aiperf_takes_every_stream(gateway: RunningGateway, tmp_path: Path, record: Record) -> None:
    measured = await aiperf(gateway.base_url, MODEL, tmp_path, requests=12, tokens=16)
    record(measured, f"real: {measured}", "load")
    assert (measured.succeeded, measured.errors) == (12, 0)
    assert measured.tokens > 12
    await gateway.everything_released()
