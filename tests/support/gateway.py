"""The gateway on a real uvicorn server in the test's own loop, on a free port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from tokenflow_gateway.app import Gateway
from tokenflow_gateway.config import load_settings
from tokenflow_gateway.http_protocol import BoundedHttpProtocol, GatewayState
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.shutdown import StagedServer

__all__ = ["RunningGateway", "eventually", "running_gateway"]

PATIENCE_S = 30.0


async def eventually(condition: Callable[[], bool], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    """Let the loop run until `condition` holds; AssertionError with `what` when time is up."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        assert loop.time() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


class PromptServer(StagedServer):
    """Goes when it is told to: uvicorn looks ten times a second."""

    async def main_loop(self) -> None:
        ticks = 0
        while not await self.on_tick(ticks // 20):
            ticks += 1
            await asyncio.sleep(0.005)


@dataclass
class RunningGateway:
    """A gateway that serves, and a client connected to it."""

    app: Gateway
    server: uvicorn.Server
    base_url: str
    client: httpx.AsyncClient

    @property
    def streams(self) -> list[Stream]:
        return list(self.app.streams)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample; 0 where there is none."""
        return self.app.metrics.registry.get_sample_value(name, labels) or 0.0

    async def everything_released(self) -> None:
        """Wait until no stream is on record, in any place."""
        await eventually(lambda: not self.streams, "all streams are gone")
        assert not any(engine.streams or engine.answered for engine in self.app.registry)


@asynccontextmanager
async def running_gateway(
    *engines: Any, around: Callable[[ASGIApp], ASGIApp] = lambda app: app, **overrides: Any
) -> AsyncIterator[RunningGateway]:
    """Serve `engines` (URLs or entries of the configuration) until the block ends.

    `around` puts something of the test's own between the server and the gateway.
    """
    settings = load_settings(overrides={"engines": list(engines), "port": 0, **overrides})
    listener = socket.create_server(("127.0.0.1", 0))
    base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = Gateway(settings, stopping=lambda: server.should_exit)
    state = GatewayState(
        max_connections=settings.max_connections,
        max_hold_s=settings.delivery.max_hold_s,
        on_refused=app.metrics.connections_refused.inc,
        on_request=app.coalescing.hold_off,
    )
    app.metrics.watch_connections(lambda: len(state.connections))
    server = PromptServer(
        uvicorn.Config(
            around(app),
            http=BoundedHttpProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=settings.shutdown_grace_s,
        ),
        state,
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await eventually(lambda: server.started or task.done(), "the gateway has started")
        async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S, trust_env=False) as client:
            yield RunningGateway(app, server, base_url, client)
    finally:
        server.should_exit = True
        await settled(task)


async def settled(task: Awaitable[None]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await task
