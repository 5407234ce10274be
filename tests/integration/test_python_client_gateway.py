"""The Python client and the gateway itself: what the one says is what the other knows."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import pytest

from support.gateway import eventually, running_gateway
from support.python_client_server import DONE, App, gated, text_event
from support.replay_engine import Pause, ReplayEngine, Script, Send, Step
from support.scenarios import replay
from support.transcripts import load
from tokenflow_client import TokenFlowReader

pytestmark = pytest.mark.timeout(60)
EVENTS = [text_event(f"word{number} ") for number in range(30)]
NOTICED_S = 0.2
WORDS, WRITTEN_S, PACE = 50, 3, 8.0
"""Of a short answer: its words, the seconds it is written in, and how many a second its reader reads."""


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_the_gateway_knows_the_reader(
    library: Literal["httpx", "httpx2"], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the answer is there; the gateway has the position to the token, and a pause in 0.2 s."""
    monkeypatch.setattr("tokenflow_client._track.STILL_S", 60.0)  # it stands still here; only words count
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


@pytest.mark.parametrize(
    ("kind", "source"), [("human", "learned"), ("voice", "learned"), ("cut off", "model")]
)
async def test_a_short_answer_teaches_how_fast_its_reader_is(kind: str, source: str) -> None:
    """Written in three seconds, read in six: the next answer begins with the pace of this reader.

    Control: a voice that is cut off when the answer is complete has not been watched for long enough.
    """
    pieces: list[Step] = [Send(text_event(f"word{number} ")) for number in range(WORDS)]
    for number in range(WRITTEN_S):
        pieces.insert((number + 1) * WORDS // WRITTEN_S + number, Pause(1.0))
    info = Script(headers={"content-type": "application/json"}, steps=[Send(b"{}")])
    scripts = {
        "m": Script(steps=[*pieces, Send(DONE)]),
        "/v1/models": replay(load("models")),
        "/model_info": info,
    }
    async with (
        ReplayEngine(scripts) as engine,
        running_gateway({"url": engine.base_url, "id": "e", "link": "off"}) as gateway,
    ):
        await eventually(lambda: all(engine.healthy for engine in gateway.app.registry), "the engine is up")
        app = App(gateway.base_url, "httpx", is_async=True)
        app.connect()
        reader = TokenFlowReader(kind="human" if kind == "human" else "voice")
        headers = {**reader.headers(), "X-TokenFlow-User": "ann"}

        async def begins() -> Any:
            await app.ask(extra_headers=headers)
            (stream,) = (stream for stream in gateway.streams if stream.end is None)
            return stream.reader.estimate(time.monotonic())

        try:
            first = await begins()
            assert first.source == "model"
            if kind == "human":
                await _read(app)
            else:
                await _hear(app, reader, cut_off=kind == "cut off")
            await eventually(lambda: app.statistics().open == 0, "all is read and told, or nobody reads")
            second = await begins()
            assert second.source == source
            assert second.rate == pytest.approx(first.rate) if source == "model" else second.rate > first.rate
        finally:
            await app.close()
        await gateway.everything_released()


async def _read(app: App) -> None:
    """By asking for each word when it is time for it."""
    async for _ in app.stream:
        await asyncio.sleep(1 / PACE)


async def _hear(app: App, reader: TokenFlowReader, *, cut_off: bool) -> None:
    """From a player that takes all text as it comes."""
    taking = asyncio.create_task(app.take_all())
    for heard in range(1, WORDS + 1):
        await asyncio.sleep(1 / PACE)
        if cut_off and taking.done():
            reader.close()
            break
        reader.shown(tokens=heard)
    await taking
