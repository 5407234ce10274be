"""What real clients make of a broken engine behind the gateway: always an error, never a whole answer.

`test_clients` shows the same faults without the gateway, where some pass for success.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from support.clients import Chat, curl, install_node_client, openai_node, openai_python
from support.gateway import RunningGateway, running_gateway
from support.replay_engine import ReplayEngine
from support.scenarios import faults, recordings
from support.transcripts import load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]
LIBRARIES = pytest.mark.parametrize("ask", [openai_python, openai_node], ids=["python", "node"])
Ask = Callable[..., Awaitable[Chat]]


@pytest.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningGateway]:
    await install_node_client()
    monkeypatch.setenv("TOKENFLOW_RUNTIME_DIR", str(tmp_path / "run"))
    scripts = recordings("chat_stream", "chat_stream_usage", "chat_stream_tools", "chat_plain", "models")
    scripts |= faults(load("chat_stream_usage"))
    scripts["/v1/models"] = scripts["models"]
    async with (
        ReplayEngine(scripts) as engine,
        running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
    ):
        yield gateway


@LIBRARIES
@pytest.mark.parametrize("recording", ["chat_stream", "as-recorded", "byte-by-byte", "crlf"])
async def test_a_stream_is_what_the_engine_said(gateway: RunningGateway, ask: Ask, recording: str) -> None:
    chat = await ask(f"{gateway.base_url}/v1", recording, stream=True)
    assert (chat.error, chat.text, chat.finish_reason) == (None, "The capital of France is Paris.", "stop")
    assert chat.usage is None or ask is openai_node, "only the Node script asks for it"


@LIBRARIES
async def test_a_plain_answer(gateway: RunningGateway, ask: Ask) -> None:
    chat = await ask(f"{gateway.base_url}/v1", "chat_plain", stream=False)
    assert (chat.error, chat.text) == (None, "The capital of France is Paris.")
    assert chat.usage


@LIBRARIES
@pytest.mark.parametrize("fault", ["ends-without-done", "closes-mid-event", "resets", "flat-error"])
async def test_a_stream_that_breaks_raises(gateway: RunningGateway, ask: Ask, fault: str) -> None:
    chat = await ask(f"{gateway.base_url}/v1", fault, stream=True)
    assert chat.error is not None
    assert "Paris" not in chat.text


@LIBRARIES
@pytest.mark.parametrize(("fault", "status"), [("error-500", 500), ("closes-at-once", 502)])
async def test_a_failure_before_the_stream_keeps_its_status(
    gateway: RunningGateway, ask: Ask, fault: str, status: int
) -> None:
    chat = await ask(f"{gateway.base_url}/v1", fault, stream=True)
    assert chat.error is not None
    assert chat.error.status == status


async def test_curl_that_leaves_is_noticed(gateway: RunningGateway) -> None:
    async with curl(f"{gateway.base_url}/v1", "endless") as running:
        await anext(running.events())
    await gateway.everything_released()
