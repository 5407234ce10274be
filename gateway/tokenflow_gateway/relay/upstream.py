"""Requests to engines on the streaming path: what is sent of a client's request, and how failures are ours.

No redirects, no cookies, no proxies of the environment: an engine is asked, and its answer is taken as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import lru_cache
from types import TracebackType
from urllib.parse import urlsplit

import msgspec

from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.relay.coalescing import ReadCoalescing
from tokenflow_gateway.relay.engine_answer import EngineAnswer
from tokenflow_gateway.relay.engine_pool import EngineConnection, EnginePool, Origin
from tokenflow_gateway.relay.errors import EngineUnreachable

__all__ = ["CREDENTIALS", "ClientHeaders", "EngineRequest", "Header", "Upstream"]

Header = tuple[bytes, bytes]

_STALE_S = 0.1
"""A kept connection that is lost within this time without a byte of answer was closed as the request came.

Its end and the request cross on their way, so that it shows within a round trip. What is lost later may have
been worked on.
"""
_ABORT_CONNECT_S = 5.0
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_NOT_FORWARDED = frozenset(
    {
        b"accept-encoding",
        b"connection",
        b"content-length",
        b"cookie",
        b"expect",
        b"host",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
    }
)
_USUAL_CONNECTIONS = (b"keep-alive", b"close")
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key"})
"""Where clients have their secrets, which are not for an engine with a key of its own."""
_NOT_FORWARDED_PREFIXES = (
    b"x-tokenflow-",
    b"x-override-",
    b"x-smg-",
    b"x-dynamo-",
    b"x-llm-d-",
    b"x-gateway-inference-",
    b"x-slo-",
    b"x-openwebui-",
)
"""The gateway's own; SGLang's, by which a request can name its `rid`: that is the gateway's to give; those by
which it could ask other gateways, behind this one, for more than it was granted; and who the user is."""


class ClientHeaders:
    """What a client has sent, and what an engine gets of it: all but what is between client and gateway."""

    __slots__ = ("_lines", "all")

    def __init__(self, headers: list[Header]) -> None:
        self.all = headers
        self._lines: dict[bool, bytes] = {}

    def lines(self, *, credentials: bool) -> bytes:
        """For an engine's head, put together once. `credentials`: it gets those, too."""
        lines = self._lines.get(credentials)
        if lines is None:
            hop_by_hop = _hop_by_hop(self.all)
            lines = self._lines[credentials] = b"".join(
                b"%b: %b\r\n" % (name, value)
                for name, value in self.all
                if _is_forwarded(name) and name not in hop_by_hop and (credentials or name not in CREDENTIALS)
            )
        return lines


class _Target:
    """Where an engine's requests go, and what is the same in the head of each."""

    __slots__ = ("fixed", "forwards_credentials", "origin", "prefix")

    def __init__(self, engine: Engine) -> None:
        parts = urlsplit(engine.config.url)
        assert parts.hostname is not None
        tls = parts.scheme == "https"
        self.origin = Origin(parts.hostname, parts.port or (443 if tls else 80), tls)
        self.prefix = parts.path.rstrip("/")
        key = engine.config.api_key
        self.forwards_credentials = key is None
        self.fixed = f"host: {parts.netloc}\r\naccept-encoding: identity\r\n".encode()
        if key is not None:
            self.fixed += f"authorization: Bearer {key.get_secret_value()}\r\n".encode()


class EngineRequest:
    """Context manager around the engine's answer, from the status line on. Leaving early ends its connection.

    Raises `NoEngine` if no connection could be made, `ConnectTimeout` if not within `connect_s`, and
    `EngineUnreachable`, also from the answer's body, if it was lost or what came is no HTTP.
    """

    __slots__ = ("_body", "_connect_s", "_connection", "_head", "_may_replace", "_method", "_origin", "_pool")

    def __init__(
        self,
        pool: EnginePool,
        origin: Origin,
        head: bytes,
        body: bytes | None,
        *,
        method: str,
        connect_s: float,
        may_replace: bool = True,
    ) -> None:
        """`may_replace`: ask again, once, if the connection proves to have been closed by the engine."""
        self._pool = pool
        self._origin = origin
        self._head = head
        self._body = body
        self._method = method
        self._connect_s = connect_s
        self._may_replace = may_replace
        self._connection: EngineConnection | None = None

    @property
    def may_replace(self) -> bool:
        """It has not been asked again."""
        return self._may_replace

    async def __aenter__(self) -> EngineAnswer:
        return await self.answer()

    async def answer(self) -> EngineAnswer:
        """What entering the context does; `leave` has to follow."""
        loop = asyncio.get_running_loop()
        while True:
            connection = self._pool.kept(self._origin)
            if connection is None:
                connection = await self._pool.new(self._origin, within_s=self._connect_s)
            kept = connection.used and self._may_replace
            asked_at = loop.time()
            answer: EngineAnswer | None = None
            try:
                answer = connection.ask(self._head, self._body, method=self._method)
                await answer.head()
            except BaseException as error:
                lost = isinstance(error, EngineUnreachable) and answer is not None and not answer.begun
                connection.leave()
                if not (lost and kept and loop.time() - asked_at < _STALE_S):
                    raise
                self._may_replace = False
                self._pool.drop_kept(self._origin)
                continue
            self._connection = connection
            return answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """What leaving the context does."""
        if self._connection is not None:
            self._connection.leave()


class Upstream:
    """Connections to engines: as many as there are streams, pooled between requests."""

    def __init__(self, coalescing: ReadCoalescing | None = None) -> None:
        self._pool = EnginePool(coalescing)
        self._targets: dict[Engine, _Target] = {}

    async def close(self) -> None:
        await self._pool.close()

    def request(
        self,
        engine: Engine,
        method: str,
        path_qs: str,
        *,
        headers: ClientHeaders,
        request_id: str,
        body: bytes | None,
        connect_s: float,
        own_headers: Iterable[Header] = (),
        may_replace: bool = True,
    ) -> EngineRequest:
        """One request to an engine, made as the context is entered."""
        target = self._targets.get(engine)
        if target is None:
            target = self._targets[engine] = _Target(engine)
        head = _request_head(target, method, path_qs, headers, own_headers, request_id, body)
        return EngineRequest(
            self._pool,
            target.origin,
            head,
            body,
            method=method,
            connect_s=connect_s,
            may_replace=may_replace,
        )

    def abort(self, engine: Engine, rid: str) -> EngineRequest:
        """What asks an SGLang without our plugin to stop a request."""
        return self.request(
            engine,
            "POST",
            "/abort_request",
            headers=_JSON,
            request_id=rid,
            body=msgspec.json.encode({"rid": rid}),
            connect_s=_ABORT_CONNECT_S,
        )


@lru_cache(maxsize=128)
def _is_forwarded(name: bytes) -> bool:
    return name not in _NOT_FORWARDED and not name.startswith(_NOT_FORWARDED_PREFIXES)


def _hop_by_hop(headers: Iterable[Header]) -> frozenset[bytes]:
    """What the client's `Connection` names is not forwarded either (RFC 9110, 7.6.1)."""
    names: frozenset[bytes] = frozenset()
    for name, value in headers:
        if name == b"connection" and value not in _USUAL_CONNECTIONS:
            names |= {option.strip() for option in value.lower().split(b",")}
    return names


_JSON = ClientHeaders([(b"content-type", b"application/json")])


def _request_head(
    target: _Target,
    method: str,
    path_qs: str,
    headers: ClientHeaders,
    own_headers: Iterable[Header],
    request_id: str,
    body: bytes | None,
) -> bytes:
    """Request line and headers."""
    lines = [
        f"{method} {target.prefix}{path_qs} HTTP/1.1\r\n".encode("latin-1"),
        target.fixed,
        headers.lines(credentials=target.forwards_credentials),
    ]
    for name, value in own_headers:
        lines += (name, b": ", value, b"\r\n")
    length = -1 if body is None else len(body)
    if length >= 0 or method in _WITH_BODY:
        lines.append(b"content-length: %d\r\n" % max(0, length))
    lines.append(f"x-request-id: {request_id}\r\n\r\n".encode("latin-1"))
    return b"".join(lines)
