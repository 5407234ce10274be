"""What else goes on while chunks of many streams are passed on together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from support import scenarios
from support.gateway import RunningGateway, running_gateway
from support.replay_engine import ReplayEngine
from support.transcripts import load
from tokenflow_gateway.relay import coalescing

CHAT = "/v1/chat/completions"


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    scripts = scenarios.recordings("models", "chat_plain")
    scripts["/v1/models"] = scripts["models"]
    scripts["stream"] = scenarios.replay(load("chat_stream"))
    async with (
        ReplayEngine(scripts) as engine,
        running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
    ):
        yield gateway


async def chunks_in_each_turn(gateway: RunningGateway) -> None:
    while True:
        if not gateway.app.coalescing.armed:
            gateway.app.coalescing.arm()
        await asyncio.sleep(0)


async def test_a_request_waits_once_and_not_in_each_of_its_turns(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its arrival to the beginning of its answer, a new connection to its engine included."""
    waits: list[float] = []
    came: list[int] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + 0.01 * len(came), sleep=waits.append)
    monkeypatch.setattr(coalescing, "time", clock)
    state = gateway.server.server_state
    hold_off = state.on_request  # type: ignore[attr-defined]

    def arrives() -> None:
        came.append(len(waits))
        hold_off()

    monkeypatch.setattr(state, "on_request", arrives)
    chunks = asyncio.create_task(chunks_in_each_turn(gateway))
    try:
        for stream in (False, True):
            body = {"model": "stream" if stream else "chat_plain", "stream": stream, "messages": ["hi"]}
            assert (await gateway.client.post(CHAT, json=body)).status_code == 200
            assert len(waits) == came[-1]
        assert (await gateway.client.get("/health/ready")).status_code == 200
        assert len(waits) == came[-1]
        assert (await gateway.client.get("/metrics")).status_code == 200
        assert len(waits) == came[-1]
    finally:
        chunks.cancel()
        await asyncio.wait((chunks,))
    assert len(came) == 4
    assert came[0] > 0
