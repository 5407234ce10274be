"""The HTTP client of the streaming path, and its failures as ours."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from yarl import URL

from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.relay.errors import EngineTimeout, EngineUnreachable, NoEngine, RelayError

__all__ = ["Header", "Upstream", "engine_failure"]

Header = tuple[bytes, bytes]

_KEEPALIVE_S = 2.0
"""Idle connections are dropped well before uvicorn drops them (5 s), so that none is used as it closes."""
_READ_BUFFER_BYTES = 16 * 1024
"""What is read ahead of the relay on one connection: twice this, and what one read of the socket brings."""
_RECEIVE_BUFFER_BYTES = 32 * 1024
"""`SO_RCVBUF` of a connection, which Linux doubles: what one read of the socket can bring."""
_NOT_FORWARDED = frozenset(
    {
        b"accept-encoding",
        b"connection",
        b"content-length",
        b"cookie",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
    }
)


class Upstream:
    """Connections to engines: as many as there are streams, pooled between requests."""

    def __init__(self, *, connect_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_small_socket
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BUFFER_BYTES,
            auto_decompress=True,
        )

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def request(
        self,
        engine: Engine,
        method: str,
        path_qs: str,
        *,
        headers: Iterable[Header],
        request_id: str,
        body: bytes | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The engine's answer, from its status line on. Leaving early closes the connection at once.

        Raises `NoEngine` if no connection could be made, otherwise whatever `engine_failure` makes of it.
        """
        try:
            async with self._session.request(
                method,
                URL(engine.config.url + path_qs, encoded=True),
                headers=_forwarded(engine, headers, request_id),
                data=body,
                allow_redirects=False,
            ) as response:
                yield response
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise engine_failure(error) from error

    async def abort(self, engine: Engine, rid: str) -> None:
        """Ask an SGLang without our plugin to stop a request. Raises `RelayError`."""
        async with self.request(
            engine,
            "POST",
            "/abort_request",
            headers=[(b"content-type", b"application/json")],
            request_id=rid,
            body=msgspec.json.encode({"rid": rid}),
        ) as response:
            await response.read()


def _small_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that lets little pile up while its stream is held."""
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    return sock


def _forwarded(engine: Engine, headers: Iterable[Header], request_id: str) -> list[tuple[str, str]]:
    sent = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name not in _NOT_FORWARDED
        and not name.startswith(b"x-tokenflow-")
        and not (engine.config.api_key and name == b"authorization")
    ]
    sent.append(("Accept-Encoding", "identity"))
    sent.append(("X-Request-ID", request_id))
    if engine.config.api_key:
        sent.append(("Authorization", f"Bearer {engine.config.api_key.get_secret_value()}"))
    return sent


def engine_failure(error: Exception) -> RelayError:
    """What a failed exchange with an engine means to the client. No address of ours is in the message."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return NoEngine("no connection to the engine within its time-out")
    if isinstance(error, aiohttp.ClientConnectorError):
        return NoEngine("the engine cannot be reached")
    if isinstance(error, TimeoutError):
        return EngineTimeout("the engine took too long")
    return EngineUnreachable("the connection to the engine was lost")
