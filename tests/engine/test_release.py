"""Clients that vanish, all at once, in front of the real engine: it is idle again within a second.

The numbers in the tests' names are those of the cases in docs/wire.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from support.gateway import eventually
from support.gateway_process import GatewayProcess
from support.raw_link import RawLink
from support.real_engine import RealEngine
from support.socket_client import SocketClient
from tokenflow_engine.protocol import EngineStats

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
CLIENTS = 20
PLACES = 12
"""What the engine runs at a time."""
LONG_PROMPT = "the licence of this program says " * 300
"""About 2,700 tokens, prefilled in pieces of 64."""
CONFIRMED = 'tokenflow_aborts_total{outcome="confirmed"}'
GENERATED = 'tokenflow_generated_tokens_total{engine="e"}'

Come = Callable[..., Awaitable[SocketClient]]


@pytest.fixture
def gateway(tiny_engine: RealEngine, tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(tiny_engine, tmp_path) as gateway:
        yield gateway


def asks(number: int, *, prompt: str = "") -> dict[str, object]:
    return {
        "model": "tiny",
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 1000,
        "messages": [{"role": "user", "content": f"request {number} {prompt}"}],
    }


@pytest.fixture
async def come(gateway: GatewayProcess) -> AsyncIterator[Come]:
    """Makes clients, each with one stream; who is still there leaves at the end of the test."""
    clients: list[SocketClient] = []

    async def come(number: int, prompt: str = "") -> SocketClient:
        client = await SocketClient.ask(gateway.base_url, CHAT, asks(number, prompt=prompt))
        clients.append(client)
        return client

    await eventually(lambda: bool(gateway.engine()["linked"]), "linked")
    yield come
    for client in clients:
        client.reset()


def generated(link: RawLink) -> int:
    """Tokens the engine has generated since its start, as it says itself from now on."""
    now = time.time()
    stats = link.wait(lambda m: isinstance(m, EngineStats) and m.at > now, what="statistics of now")
    assert isinstance(stats, EngineStats)
    return stats.generated_total


async def gone(gateway: GatewayProcess, clients: list[SocketClient]) -> None:
    """All clients vanish; a second later nothing of theirs is left."""
    for client in clients:
        client.reset()
    await eventually(
        lambda: gateway.metric(CONFIRMED) == len(clients), "every abort is confirmed", timeout_s=1.0
    )
    await eventually(gateway.is_idle, "the engine is idle", timeout_s=1.0)


async def test_case_15_and_19_twenty_clients_that_reset_after_three_chunks(
    gateway: GatewayProcess, link: RawLink, come: Come
) -> None:
    """More than the engine runs at a time, so some of them reset while others still wait."""
    before = generated(link)
    clients = [await come(number) for number in range(CLIENTS)]
    await eventually(
        lambda: sum(client.body.count(b"\n\n") >= 3 for client in clients) >= PLACES, "three chunks each"
    )
    await gone(gateway, clients)
    assert gateway.metric(GENERATED) == generated(link) - before, "every token is accounted"


async def test_case_15_twenty_clients_that_reset_during_a_long_prefill(
    gateway: GatewayProcess, link: RawLink, come: Come
) -> None:
    before = generated(link)
    clients = [await come(number, LONG_PROMPT) for number in range(CLIENTS)]
    await eventually(lambda: len(gateway.streams()) == CLIENTS, "the gateway has them all")
    await eventually(lambda: any(s["state"] == "running" for s in gateway.streams()), "one is prefilled")
    await gone(gateway, clients)
    assert gateway.metric(GENERATED) == generated(link) - before, "every token is accounted"


async def test_a_client_that_stays_keeps_its_stream(gateway: GatewayProcess, come: Come) -> None:
    """The control: of two clients one vanishes, and the engine goes on for the other."""
    stays, goes = await come(1), await come(2)
    await asyncio.gather(stays.got_text.wait(), goes.got_text.wait())
    goes.reset()
    await eventually(lambda: gateway.metric(CONFIRMED) == 1, "its abort is confirmed")
    had = len(stays.body)
    await eventually(lambda: len(stays.body) > had + 2000, "the other one goes on")
    assert not gateway.is_idle()
    stays.reset()
    await eventually(gateway.is_idle, "the engine is idle", timeout_s=1.0)
