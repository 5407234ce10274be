"""Lines of the log as `tokenflow serve` writes them: JSON, each with its request's id, none with its text."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator

import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.plugin_stand_in import PluginStandIn
from support.replay_engine import Never, ReplayEngine, Script, Send
from support.served_logs import logging_as_served
from support.wire import text_chunk
from tokenflow_gateway.relay.delivery import Delivery

CHAT = "/v1/chat/completions"
SECRET_PROMPT, SECRET_ANSWER = "what nobody else may read", "nor this"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What goes to standard error."""
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    with logging_as_served():
        yield written


def lines(log: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def told(log: io.StringIO) -> set[tuple[object, object]]:
    return {(line["event"], line.get("request_id")) for line in lines(log)}


async def left_halfway(gateway: RunningGateway, request_id: str, log: io.StringIO) -> None:
    """A client that goes once its keep-alive has failed."""
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": SECRET_PROMPT}]}
    head = {"x-request-id": request_id}
    async with gateway.client.stream("POST", CHAT, json=body, headers=head) as answer:
        parts = answer.aiter_raw()
        await anext(parts)
        await eventually(lambda: ("fault in a keep-alive", request_id) in told(log), "the fault is logged")
    await gateway.everything_released()


async def test_each_line_of_a_request_has_its_id_and_none_its_text(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the link, a background task of it, and a fault in it say."""

    def fails(_self: Delivery, _data: bytes) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Delivery, "interject", fails)
    scripts = scenarios.recordings("models")
    scripts |= {
        "/v1/models": scripts["models"],
        "m": Script(steps=[Send(text_chunk(SECRET_ANSWER)), Never()]),
        "/model_info": Script(headers={"content-type": "application/json"}, steps=[Send(b"{}")]),
    }
    async with ReplayEngine(scripts) as engine:
        with PluginStandIn(engine.base_url):
            keep_alive = {"form": "comment", "every_s": 0.05}
            async with running_gateway({"url": engine.base_url}, keep_alive=keep_alive) as gateway:
                (known,) = gateway.app.registry
                await eventually(lambda: known.linked, "the plugin is linked")
                before = len(lines(log))
                await asyncio.gather(*(left_halfway(gateway, name, log) for name in ("one", "two")))
                said = lines(log)[before:]
    assert {line["event"] for line in said} == {
        "fault in a keep-alive",
        "stream ended",
        "engine dropped the request",
    }
    assert {line.get("request_id") for line in said} == {"one", "two"}
    assert SECRET_PROMPT not in log.getvalue()
    assert SECRET_ANSWER not in log.getvalue()
