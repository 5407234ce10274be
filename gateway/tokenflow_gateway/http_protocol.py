"""uvicorn's HTTP protocol with bounds on what a client may do before it is known what it wants."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenflow_gateway.readers.transport import SocketMeter
from tokenflow_gateway.relay.exchange import CONNECTION

__all__ = ["HEAD_TIMEOUT_S", "MAX_HEAD_BYTES", "BoundedHttpProtocol"]

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; a longer head is answered 431."""
HEAD_TIMEOUT_S = 20.0
"""From the connection, or the first byte of a further request, to the end of its head."""

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: 115\r\n\r\n"
    b'{"error":{"message":"the request\'s headers are too large","type":"invalid_request_error",'
    b'"param":null,"code":null}}'
)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Bounds the head of a request in bytes and time, and serves one request at a time.

    A client that sends a further request before it has its answer gets that answer, and then the connection
    is closed: uvicorn would stop reading, and so never see that the client has left.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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

    # ---- for the relay: see `relay.exchange.ClientConnection` -----------------------------------

    @property
    def writable(self) -> bool:
        return not self.flow.write_paused

    def abort(self) -> None:
        self.transport.abort()

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
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_is_here(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
