"""The server, and the stages in which it goes.

A signal takes readiness away, and new requests are answered 503; the listener stays open meanwhile, so that
clients are told, and reports of running streams arrive. What runs may finish within the grace. Then it is
ended, each stream with an error event, and its connection has a moment to take that. A second signal ends the
grace.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from types import FrameType

import structlog
import uvicorn

from tokenflow_gateway.http_protocol import BoundedHttpProtocol, GatewayState

__all__ = ["StagedServer"]

_log = structlog.stdlib.get_logger("tokenflow.gateway")

_LOOK_AGAIN_S = 0.02
_LAST_WORDS_S = 2.0
"""For requests that are ended; the relay takes half of that for a client that does not read."""
_FLUSH_S = 1.0
"""For connections to take what has been written to them."""


class StagedServer(uvicorn.Server):
    """uvicorn's server, which loses no answer in silence as it goes."""

    def __init__(self, config: uvicorn.Config, state: GatewayState) -> None:
        super().__init__(config)
        self.server_state: GatewayState = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM or Ctrl-C."""
        if self.should_exit:
            self.force_exit = True
        elif self.config.loaded:
            self._say_close()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all requests, and then the application."""
        running = len(self.server_state.tasks)
        _log.info("gateway is shutting down", requests=running, grace_s=self.config.timeout_graceful_shutdown)
        self._say_close()
        for connection in self._open():
            connection.close_if_idle()
        await self._wait_for_requests()
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        await self._end_requests()
        await self._flush()
        await self.lifespan.shutdown()

    # ---- inside ----------------------------------------------------------------------------------

    def _open(self) -> list[BoundedHttpProtocol]:
        return [it for it in self.server_state.connections if isinstance(it, BoundedHttpProtocol)]

    def _say_close(self) -> None:
        """Every answer that begins from now on is the last one on its connection, and says so."""
        self.server_state.default_headers = [*self.config.encoded_headers, (b"connection", b"close")]

    async def _wait_for_requests(self) -> None:
        """Until nothing runs any more, the grace is over, or a second signal comes."""
        state = self.server_state
        grace_s = self.config.timeout_graceful_shutdown
        await _until(lambda: self.force_exit or not state.tasks, math.inf if grace_s is None else grace_s)

    async def _end_requests(self) -> None:
        tasks = list(self.server_state.tasks)
        if not tasks:
            return
        _log.warning("requests are ended by the shutdown", requests=len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_LAST_WORDS_S)

    async def _flush(self) -> None:
        """Close all connections, once they have taken what was written to them."""
        for connection in self._open():
            connection.transport.close()
        await _until(lambda: not self.server_state.connections, _FLUSH_S)
        for connection in self._open():
            connection.transport.abort()


async def _until(done: Callable[[], bool], within_s: float) -> None:
    """Look now and then: what uvicorn keeps, and a signal's flag, wake nobody."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while not done() and loop.time() < until:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_AGAIN_S)
