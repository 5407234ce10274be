"""uvicorn's HTTP protocol with bounds on what a client may do before it is known what it wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokenflow_gateway.readers.transport import SocketMeter
from tokenflow_gateway.relay.dialects import dialect_of
from tokenflow_gateway.relay.errors import RelayError, TooManyConnections, error_body
from tokenflow_gateway.relay.exchange import CONNECTION, Exchange
from tokenflow_gateway.relay.guard import ClientGone

__all__ = ["HEAD_TIMEOUT_S", "MAX_HEAD_BYTES", "SPARE_CONNECTIONS", "BoundedHttpProtocol", "GatewayState"]

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; a longer head is answered 431."""
HEAD_TIMEOUT_S = 20.0
"""From the connection, or the first byte of a further request, to the end of its head."""
SPARE_CONNECTIONS = 64
"""Beyond the limit, so many may wait for their answer that there are too many; others are cut off at once."""
_REFUSED_S = 2.0
"""For such a connection to send its request."""
_REFUSED_BODY_BYTES = 1024 * 1024

_NO_PIPELINE: deque[tuple[RequestResponseCycle, ASGI3Application]] = deque()
"""One for all: a request that comes too early is not queued, and an empty queue takes 700 bytes."""


def _refusal(status: bytes, message: str) -> bytes:
    """The answer to what never becomes a request."""
    body = error_body(message, status=400)
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


_TOO_LARGE = _refusal(b"431 Request Header Fields Too Large", "the request's headers are too large")
_NO_REQUEST = _refusal(b"400 Bad Request", "this is no HTTP request that can be understood")


class GatewayState(ServerState):
    """What the connections of one server share: their set, and how large it may become."""

    def __init__(self, *, max_connections: int, on_refused: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.max_connections = max_connections
        self.on_refused = on_refused
        """Called for each connection beyond."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Bounds connections in number, the head of a request in bytes and time; serves one request at a time.

    A client that sends a further request before it has its answer gets that answer, and then the connection
    is closed: uvicorn would stop reading, and so never see that the client has left.
    """

    server_state: GatewayState

    def __init__(
        self,
        config: Config,
        server_state: GatewayState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.writable = True
        self.pipeline = _NO_PIPELINE
        self._head_within_s = HEAD_TIMEOUT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - self.server_state.max_connections
        if excess > 0:
            self.server_state.on_refused()
            self.app, self._head_within_s = _too_many, _REFUSED_S
        if excess > SPARE_CONNECTIONS:
            transport.abort()
        self.meter = SocketMeter.of(transport)
        self._deaf = False
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request. In the middle of an answer there is no place to say so."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        self.transport.write(_NO_REQUEST)
        self.transport.close()

    # ---- for the server ----------------------------------------------------------------------------

    def close_if_idle(self) -> None:
        """Close the connection between two requests; one under way, or whose head has begun, is answered."""
        if self.cycle is None or self._head_bytes:
            return
        if self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    # ---- for the relay: see `relay.exchange.ClientConnection` -----------------------------------

    def pause_writing(self) -> None:
        self.writable = False
        super().pause_writing()

    def resume_writing(self) -> None:
        self.writable = True
        super().resume_writing()

    def write(self, data: bytes) -> None:
        cycle = self.cycle
        if cycle.disconnected:
            return
        if cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self.transport.write(data)

    def abort(self) -> None:
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            cycle.send = _until_close(cycle)  # type: ignore[method-assign, assignment]
        super()._start_asgi_task(cycle, app)

    # ---- callbacks of the parser -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._deaf = True
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self.scope.setdefault("extensions", {})[CONNECTION] = self  # type: ignore[assignment]
        self._in_head = True
        if self._head_timer is None:
            self._expect_head()

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._deaf:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._deaf:
            self._head_is_here()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._deaf:
            super().on_message_complete()
            self._head_bytes = 0

    # ---- the head's time -------------------------------------------------------------------------

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._head_within_s, self.transport.close)

    def _head_is_here(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer to a request on a connection beyond the limit."""
    exchange = Exchange(scope, receive, send)
    error = TooManyConnections("the gateway has as many connections as it may have: try again")
    with contextlib.suppress(ClientGone, RelayError):
        await exchange.read_body(_REFUSED_BODY_BYTES, within_s=_REFUSED_S)
    await exchange.fail(error, dialect_of(exchange.path).error_body(error))


_ENDLESS = 1 << 62


def _until_close(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """`send` for HTTP/1.0, which knows no chunks: a body without a length ends with the connection."""
    send, endless = cycle.send, False

    async def send_until_close(message: ASGISendEvent) -> None:
        nonlocal endless
        if message["type"] == "http.response.start":
            endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if endless:
                cycle.chunked_encoding, cycle.expected_content_length = False, _ENDLESS
        elif endless and message["type"] == "http.response.body" and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_until_close
