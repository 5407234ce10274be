"""A gateway with tenants and classes of service, and requests with the keys of these."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx

from support.gateway import RunningGateway, running_gateway
from support.replay_engine import ReplayEngine, SeenRequest
from tokenflow_gateway.tenants.keys import NewKey

__all__ = ["CHAT", "asks", "bearer", "last_post", "post", "serving", "until_answered"]

CHAT = "/v1/chat/completions"
CLASSES = {
    "gold": {"weight": 8, "ttft_ms": 500, "may_park": False, "lead_cap_s": 20, "engine_priority": 10},
    "bronze": {"weight": 1, "ttft_ms": 4000, "max_rate": 10},
}
TENANTS = {"acme": {"classes": ["gold", "bronze"]}, "low": {"classes": ["bronze"]}}


def serving(
    engine: ReplayEngine, state: Path, *, link: str | None = "off", **settings: Any
) -> AbstractAsyncContextManager[RunningGateway]:
    entry = {"url": engine.base_url, "id": "e", **({} if link is None else {"link": link})}
    return running_gateway(entry, state_dir=state, classes=CLASSES, tenants=TENANTS, **settings)


def bearer(made: NewKey | str) -> dict[str, str]:
    return {"authorization": f"Bearer {made if isinstance(made, str) else made.text}"}


def asks(model: str = "chat_stream", **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}


async def post(
    gateway: RunningGateway, headers: dict[str, str] | None = None, path: str = CHAT, **fields: object
) -> httpx.Response:
    return await gateway.client.post(path, json=asks(**fields), headers=headers)


def last_post(engine: ReplayEngine) -> SeenRequest:
    return [seen for seen in engine.requests if seen.method == "POST"][-1]


async def until_answered(gateway: RunningGateway, made: NewKey | None, status: int) -> float:
    """Ask until the answer has this `status`: seconds that it took."""
    begun = time.monotonic()
    async with asyncio.timeout(5):
        while (  # noqa: ASYNC110 - the gateway looks at a file of another process: nobody tells
            await post(gateway, made and bearer(made))
        ).status_code != status:
            await asyncio.sleep(0.02)
    return time.monotonic() - begun
