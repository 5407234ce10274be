"""Requests to engines on the streaming path: what is sent of a client's request, and how failures are ours.

No redirects, no cookies, no proxies of the environment: an engine is asked, and its answer is taken as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.relay.engine_answer import EngineAnswer
from tokenflow_gateway.relay.engine_pool import EnginePool, Origin
from tokenflow_gateway.relay.errors import EngineUnreachable

__all__ = ["Header", "Upstream"]

Header = tuple[bytes, bytes]

_STALE_S = 1.0
"""A kept connection that is lost within this time without a byte of answer was closed as the request came."""
_ABORT_CONNECT_S = 5.0
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_ABORT_CONNECT_S = 5.0
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
_NOT_FORWARDED_PREFIXES = (b"x-tokenflow-", b"x-override-")
"""The gateway's own, and SGLang's, by which a request can name its `rid`: that is the gateway's to give."""


class _Target:
    """Where an engine's requests go, and what is the same in the head of each."""

    __slots__ = ("fixed", "forwards_authorization", "origin", "prefix")

    def __init__(self, engine: Engine) -> None:
        parts = urlsplit(engine.config.url)
        assert parts.hostname is not None
        tls = parts.scheme == "https"
        self.origin = Origin(parts.hostname, parts.port or (443 if tls else 80), tls)
        self.prefix = parts.path.rstrip("/")
        key = engine.config.api_key
        self.forwards_authorization = key is None
        self.fixed = f"host: {parts.netloc}\r\naccept-encoding: identity\r\n".encode()
        if key is not None:
            self.fixed += f"authorization: Bearer {key.get_secret_value()}\r\n".encode()


class Upstream:
    """Connections to engines: as many as there are streams, pooled between requests."""

    def __init__(self) -> None:
        self._pool = EnginePool()
        self._targets: dict[Engine, _Target] = {}

    async def close(self) -> None:
        await self._pool.close()

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
        connect_s: float,
        own_headers: Iterable[Header] = (),
    ) -> AsyncIterator[EngineAnswer]:
        """The engine's answer, from its status line on. Leaving early closes the connection at once.

        Raises `NoEngine` if no connection could be made, `ConnectTimeout` if not within `connect_s`, and
        `EngineUnreachable`, also from the answer's body, if it was lost or what came is no HTTP.
        """
        target = self._targets.get(engine)
        if target is None:
            target = self._targets[engine] = _Target(engine)
        head = _request_head(target, method, path_qs, headers, own_headers, request_id, body)
        loop = asyncio.get_running_loop()
        fresh = False
        while True:
            connection = await self._pool.connection(target.origin, within_s=connect_s, fresh=fresh)
            asked_at = loop.time()
            try:
                answer = connection.ask(head, body, method=method)
                try:
                    await answer.head()
                except EngineUnreachable:
                    if connection.used and not answer.begun and loop.time() - asked_at < _STALE_S:
                        fresh = True
                        continue
                    raise
                yield answer
            finally:
                connection.leave()
            return

    async def abort(self, engine: Engine, rid: str) -> None:
        """Ask an SGLang without our plugin to stop a request. Raises `RelayError`."""
        async with self.request(
            engine,
            "POST",
            "/abort_request",
            headers=[(b"content-type", b"application/json")],
            request_id=rid,
            body=msgspec.json.encode({"rid": rid}),
            connect_s=_ABORT_CONNECT_S,
        ) as response:
            await response.read()


def _request_head(
    target: _Target,
    method: str,
    path_qs: str,
    headers: Iterable[Header],
    own_headers: Iterable[Header],
    request_id: str,
    body: bytes | None,
) -> bytes:
    """Request line and headers: the client's, but for what is between it and the gateway only."""
    lines = [f"{method} {target.prefix}{path_qs} HTTP/1.1\r\n".encode("latin-1"), target.fixed]
    for name, value in headers:
        if (
            name not in _NOT_FORWARDED
            and not name.startswith(_NOT_FORWARDED_PREFIXES)
            and (target.forwards_authorization or name != b"authorization")
        ):
            lines += (name, b": ", value, b"\r\n")
    for name, value in own_headers:
        lines += (name, b": ", value, b"\r\n")
    length = -1 if body is None else len(body)
    if length >= 0 or method in _WITH_BODY:
        lines.append(b"content-length: %d\r\n" % max(0, length))
    lines.append(f"x-request-id: {request_id}\r\n\r\n".encode("latin-1"))
    return b"".join(lines)
