"""The Python client and the gateway itself: what the one says is what the other knows."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import pytest

from support.gateway import eventually, running_gateway
from support.python_client_server import App, gated, text_event
from support.replay_engine import ReplayEngine, Script, Send
from support.scenarios import replay
from support.transcripts import load
from tokenflow_client import TokenFlowReader

pytestmark = pytest.mark.timeout(60)
EVENTS = [text_event(f"word{number} ") for number in range(30)]
NOTICED_S = 0.2


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_the_gateway_knows_the_reader(library: Literal["httpx", "httpx2"], is_async: bool) -> None:
    """All of the answer is there; the gateway has the position to the token, and a pause in 0.2 s."""
    gate = asyncio.Event()
    info = Script(headers={"content-type": "application/json"}, steps=[Send(b"{}")])
    scripts = {"m": gated(EVENTS, gate), "/v1/models": replay(load("models")), "/model_info": info}
    async with (
        ReplayEngine(scripts) as engine,
        running_gateway({"url": engine.base_url, "id": "e", "link": "off"}) as gateway,
    ):
        await eventually(lambda: all(engine.healthy for engine in gateway.app.registry), "the engine is up")
        app, reader = App(gateway.base_url, library, is_async), TokenFlowReader(rate=2.0)
        app.connect()
        try:
            await app.ask(extra_headers=reader.headers())
            for _ in range(12):
                await app.take()
            stream = gateway.streams[0]

            def estimate() -> Any:
                return stream.reader.estimate(time.monotonic())

            await eventually(lambda: 11 <= estimate().consumed < 12, "it knows that 11 of 12 are read")
            assert estimate().source == "progress"
            delays_s = []
            for step, is_paused in ((reader.pause, True), (reader.resume, False)) * 3:
                at_s = time.monotonic()
                step()
                await eventually(
                    lambda told=is_paused: (estimate().state == "paused") is told, "it is noticed"
                )
                delays_s.append(time.monotonic() - at_s)
            assert sorted(delays_s)[2] < NOTICED_S, "the better half; this machine may be busy"
            gate.set()
            await app.take_all()
        finally:
            gate.set()
            await app.close()
        await gateway.everything_released()
