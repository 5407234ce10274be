"""HTTP as cheap as a thousand readers on one core need it: httptools on asyncio's protocols."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

__all__ = ["Exchange", "Posts", "Server", "post_bytes"]


@dataclass(frozen=True, slots=True)
class Server:
    """Where an endpoint is; `path` is what stands before the route."""

    host: str
    port: int
    path: str
    is_https: bool

    @classmethod
    def at(cls, url: str) -> Server:
        """Of a base URL, with or without ``/v1``."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is not an http(s) URL")
        is_https = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if is_https else 80), path, is_https)

    async def connect(self, exchange: Exchange) -> None:
        """Open a connection of its own for `exchange`. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if self.is_https else None
        await loop.create_connection(lambda: exchange, self.host, self.port, ssl=context)


def post_bytes(server: Server, route: str, body: bytes, headers: dict[str, str]) -> bytes:
    """A whole request."""
    lines = [f"POST {server.path}{route} HTTP/1.1", f"Host: {server.host}:{server.port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


class Exchange(asyncio.Protocol):
    """One connection: requests are sent with `send`, answers come to the methods that subclasses write.

    `lost` is called once, when the connection is gone; what it means depends on what came before.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)

    def header(self, name: bytes, value: bytes) -> None:
        """One header, its name in lower case."""

    def body(self, data: bytes) -> None:
        """A piece of the body, transfer coding removed."""

    def complete(self) -> None:
        """The whole answer has come."""

    def lost(self, why: str) -> None:
        """There is no connection any more."""

    def send(self, request: bytes) -> None:
        """The next request, after the answer to the one before."""
        assert self.transport is not None
        self.transport.write(request)

    def close(self) -> None:
        """Drop the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    # ---- asyncio ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is of no class of asyncio

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.lost(f"not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.lost(str(exc or "connection closed"))

    # ---- httptools ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.status = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self.header(name.lower(), value)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.body(data)

    def on_message_complete(self) -> None:
        self.complete()


class _Post(Exchange):
    """A connection of the pool, busy with one request at a time."""

    def __init__(self, pool: Posts) -> None:
        super().__init__()
        self._pool = pool

    def complete(self) -> None:
        self._pool.answered(self)

    def lost(self, why: str) -> None:
        self._pool.gone(self)


class Posts:
    """Small requests whose answers matter only as a count, over a few connections kept open."""

    def __init__(self, server: Server, *, connections: int = 4) -> None:
        self._server = server
        self._limit = connections
        self._idle: list[_Post] = []
        self._open: set[_Post] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._queue: deque[bytes] = deque()
        self.statuses: dict[int, int] = {}
        """How often each status came."""
        self.lost = 0
        """Connections that ended by themselves, or could not be opened."""

    def post(self, route: str, body: bytes) -> None:
        """Send it as soon as a connection is free."""
        self._queue.append(post_bytes(self._server, route, body, {}))
        self._serve()

    async def close(self) -> None:
        """Drop the connections and what has not been sent."""
        self._queue.clear()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._open):
            self._open.discard(connection)
            connection.close()

    def answered(self, connection: _Post) -> None:
        self.statuses[connection.status] = self.statuses.get(connection.status, 0) + 1
        self._idle.append(connection)
        self._serve()

    def gone(self, connection: _Post) -> None:
        if connection in self._open:
            self._open.discard(connection)
            self.lost += 1
        if connection in self._idle:
            self._idle.remove(connection)

    def _serve(self) -> None:
        while self._queue and self._idle:
            self._idle.pop().send(self._queue.popleft())
        if self._queue and len(self._open) + len(self._connecting) < self._limit:
            task = asyncio.ensure_future(self._connect())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self) -> None:
        connection = _Post(self)
        try:
            await self._server.connect(connection)
        except OSError:
            self.lost += 1
            return
        self._open.add(connection)
        self._idle.append(connection)
        self._serve()
