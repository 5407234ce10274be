"""curl at a terminal, through the gateway: when it prints what, and how it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.curl import curl
from support.gateway import running_gateway
from support.replay_engine import ReplayEngine
from support.scenarios import replay
from support.transcripts import load

pytestmark = pytest.mark.e2e

STREAM = load("chat_stream")
MODELS = {"/v1/models": replay(load("models"))}


@pytest.fixture(autouse=True)
def _private_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFLOW_RUNTIME_DIR", str(tmp_path / "run"))


async def test_each_event_is_printed_before_the_engine_sends_the_next_one() -> None:
    gates = {number: asyncio.Event() for number in range(1, len(STREAM.reads))}
    events = []
    async with (
        ReplayEngine({"m": replay(STREAM, gates=gates), **MODELS}) as engine,
        running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
        curl(f"{gateway.base_url}/v1", "m") as client,
    ):
        assert client.status == 200
        assert client.headers["content-type"] == STREAM.headers["content-type"]
        assert client.headers["x-accel-buffering"] == "no"
        async for _, event in client.events():
            events.append(event)
            if gate := gates.get(len(events)):
                gate.set()
        assert await client.exit_code() == 0
    assert b"".join(events) == STREAM.data
