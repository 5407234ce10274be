"""Every client through the gateway, in front of recorded bytes of the real engine and their faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import msgspec
import pytest
import pytest_asyncio

from compat.cases import Record, can
from compat.clients import ClientProcess
from compat.features import FEATURES, KEPT_ALIVE, LEAVES, RETRIES, Feature, scripts
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import ReplayEngine, Script, SeenRequest, Send, Step
from support.transcripts import load

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

PATIENCE_S = 5.0
RETRY_AFTER_S = 1
TABLE = "replayed"


@dataclass(frozen=True)
class Stage:
    """A gateway in front of the replayed engine."""

    engine: ReplayEngine
    gateway: RunningGateway

    @property
    def url(self) -> str:
        return f"{self.gateway.base_url}/v1"

    def asked(self, model: str) -> list[SeenRequest]:
        """The requests that the engine got for this model."""
        return [seen for seen in self.engine.requests if seen.script_name == model]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENFLOW_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        async with (
            ReplayEngine(scripts()) as engine,
            running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
        ):
            yield Stage(engine, gateway)


@can(*FEATURES)
async def test_feature(client: ClientProcess, feature: Feature, stage: Stage, record: Record) -> None:
    record(client, feature.name, TABLE)
    body = feature.request(feature.name)
    before = len(stage.asked(feature.name))
    through = await client.ask(stage.url, body, op=feature.op)
    feature.check(through)
    if feature.as_direct:
        direct = await client.ask(f"{stage.engine.base_url}/v1", body, op=feature.op)
        assert through == direct
        if feature.op != "models":
            ours, theirs = stage.asked(feature.name)[before:]
            assert untouched(ours) == untouched(theirs)
            assert stream_options(theirs).items() <= stream_options(ours).items()


def untouched(seen: SeenRequest) -> dict[str, bytes]:
    """The request's fields as bytes, but for those that the gateway sets or adds to."""
    body = msgspec.json.decode(seen.body, type=dict[str, msgspec.Raw])
    return {name: bytes(value) for name, value in body.items() if name not in ("rid", "stream_options")}


def stream_options(seen: SeenRequest) -> dict[str, bool]:
    options: dict[str, bool] = seen.json().get("stream_options") or {}
    return options


@can(LEAVES)
async def test_a_user_who_leaves(
    client: ClientProcess, feature: Feature, stage: Stage, record: Record
) -> None:
    record(client, feature.name, TABLE)
    started = time.monotonic()
    outcome = await client.ask(stage.url, feature.request(feature.name), leave_after=2)
    assert outcome.chunks >= 1
    assert time.monotonic() - started < PATIENCE_S, "it left by itself, not by a time-out"
    async with asyncio.timeout(PATIENCE_S):
        await stage.asked(feature.name)[-1].disconnected.wait()
    await stage.gateway.everything_released()


Speaking = dict[str, RunningGateway]
"""Gateways that speak up after a twentieth of a second of silence, by the feature they are for."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speaking(stage: Stage) -> AsyncIterator[Speaking]:
    gateways: Speaking = {}
    async with AsyncExitStack() as stack:
        for feature in KEPT_ALIVE:
            settings = {"keep_alive": {"form": feature.name.rpartition("-")[2], "every_s": 0.05}}
            engine = {"url": stage.engine.base_url, "link": "off"}
            gateway = await stack.enter_async_context(running_gateway(engine, **settings))
            body = {"model": feature.name, "stream": True}
            heard = (await gateway.client.post("/v1/chat/completions", json=body)).content
            assert len(heard.split(b"\n\n")) > len(load("chat_stream").reads) + 4, "both silences are filled"
            gateways[feature.name] = gateway
        yield gateways


@can(*KEPT_ALIVE)
async def test_keep_alive(
    client: ClientProcess, feature: Feature, speaking: Speaking, record: Record
) -> None:
    """Before the first byte of a slow engine and in the middle of its answer."""
    record(client, feature.name, TABLE)
    feature.check(await client.ask(f"{speaking[feature.name].base_url}/v1", feature.request(feature.name)))


@can(*RETRIES.values())
async def test_retries(client: ClientProcess, feature: Feature, stage: Stage, record: Record) -> None:
    """The engine is full, says when to come again, and has room then."""
    record(client, feature.name, TABLE)
    model, status = feature.name, int(feature.name.rpartition("-")[2])
    asked_at: list[float] = []
    stage.engine.scripts[model] = timed(full(status), asked_at)
    asking = asyncio.create_task(client.ask(stage.url, feature.request(model), retries=2))
    await eventually(lambda: len(asked_at) == 1, "the client asks")
    stage.engine.scripts[model] = timed(feature.answer(), asked_at)
    feature.check(await asking)
    refused, answered = asked_at
    assert answered - refused >= RETRY_AFTER_S - 0.01, "timers may be a little early"


def timed(script: Script, asked_at: list[float]) -> Script:
    """The same, noting when it is asked for."""

    class Steps:
        def __iter__(self) -> Iterator[Step]:
            asked_at.append(time.monotonic())
            return iter(script.steps)

    return replace(script, steps=Steps())


def full(status: int) -> Script:
    text = b'{"error":{"message":"the engine is full","type":"overloaded_error","param":null,"code":null}}'
    headers = {
        "content-type": "application/json",
        "content-length": str(len(text)),
        "retry-after": str(RETRY_AFTER_S),
    }
    return Script(status=status, headers=headers, steps=[Send(text)])
