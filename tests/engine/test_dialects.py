"""Messages and responses on the real engine: known to the plugin by name, counted, and aborted at once."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.gateway import RunningGateway, eventually, running_gateway
from support.real_engine import RealEngine

pytestmark = pytest.mark.engine

PATHS = ["/v1/messages", "/v1/responses"]
TEXT = {"/v1/messages": b"text_delta", "/v1/responses": b"response.output_text.delta"}
GONE_WITHIN_S = 1.0
"""Of a client that leaves until nothing of its request is left in the engine."""


def asks(gateway: RunningGateway, path: str, tokens: int) -> dict[str, Any]:
    """A story of so many tokens. SGLang takes a response's model by its own name for it only."""
    story = "Tell me a story."
    body = {"model": gateway.app.registry.models()[0]["id"], "stream": True, "temperature": 0}
    if path == "/v1/responses":
        return {**body, "max_output_tokens": tokens, "input": story}
    return {**body, "max_tokens": tokens, "messages": [{"role": "user", "content": story}]}


@pytest.fixture
async def gateway(tiny_engine: RealEngine) -> AsyncIterator[RunningGateway]:
    entry = {"url": tiny_engine.base_url, "id": "e", "link": tiny_engine.link}
    async with running_gateway(entry, link_secret=tiny_engine.secret) as gateway:
        engine = next(iter(gateway.app.registry))
        await eventually(lambda: engine.linked and engine.kind == "sglang", "the engine is linked")
        yield gateway


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_answer_is_counted_as_the_plugin_counts_it(gateway: RunningGateway, path: str) -> None:
    """By the engine's usage and by the plugin's count of the request of this name: both the same."""
    async with gateway.client.stream("POST", path, json=asks(gateway, path, 24), timeout=60.0) as answer:
        data = await answer.aread()
    assert answer.status_code == 200, data
    usage = int(re.findall(rb'"output_tokens":(\d+)', data)[-1])
    assert usage >= 20  # SGLang takes two off what a response may have
    await gateway.everything_released()
    assert gateway.metric("tokenflow_generated_tokens_total", engine="e") == usage
    assert gateway.metric("tokenflow_count_mismatches_total", engine="e") == 0
    labels = {"engine": "e", "route": path, "reason": "finished"}
    assert gateway.metric("tokenflow_streams_ended_total", **labels) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_frees_the_engine(gateway: RunningGateway, path: str) -> None:
    async with gateway.client.stream("POST", path, json=asks(gateway, path, 2000), timeout=60.0) as answer:
        reads = answer.aiter_raw()
        while TEXT[path] not in await anext(reads):
            pass
        await eventually(lambda: bool(gateway.streams[0].counted), "the plugin counts this stream")
    left = time.monotonic()
    await gateway.everything_released()
    assert time.monotonic() - left < GONE_WITHIN_S
    assert gateway.metric("tokenflow_aborts_total", outcome="confirmed") == 1


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_response_in_the_background_is_open_until_the_engine_has_ended_it(
    gateway: RunningGateway, *, cancelled: bool
) -> None:
    asked = asks(gateway, "/v1/responses", 2000 if cancelled else 24) | {"stream": False, "background": True}
    answer = await gateway.client.post("/v1/responses", json=asked)
    assert answer.json()["status"] == "queued", answer.text
    path = f"/v1/responses/{answer.json()['id']}"
    (stream,) = gateway.streams
    await eventually(lambda: (stream.counted or 0) > 5, "the plugin knows of it", timeout_s=60.0)
    if cancelled:
        assert (await gateway.client.post(f"{path}/cancel")).json()["status"] == "cancelled"
    await eventually(lambda: not gateway.streams, "it has ended", timeout_s=60.0)
    response = (await gateway.client.get(path)).json()
    if cancelled:
        assert (response["status"], stream.end) == ("cancelled", "client_gone")
        assert 5 < stream.generated < 2000
    else:
        assert (response["status"], stream.end) == ("incomplete", "finished")
        assert stream.generated == response["usage"]["output_tokens"] == stream.counted
        assert stream.prompt_tokens == response["usage"]["input_tokens"]
