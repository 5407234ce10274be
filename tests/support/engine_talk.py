"""An engine of bytes and a client of it, and answers in each framing that HTTP has."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from support.raw_engine import Answer, Asked, RawEngine, raw_engine
from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.relay.upstream import ClientHeaders, Upstream

__all__ = ["CHUNKED", "OK", "PLAIN", "UNTIL_CLOSE", "Talk", "closing", "talk"]

OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"content-length: 5\r\n\r\nhello"
CHUNKED = (
    OK + b"Transfer-Encoding: chunked\r\nX-A: 1\r\nx-a: 2\r\n\r\n"
    b"5\r\nhello\r\n7;ext=1\r\n, world\r\n0\r\nx-trailer: t\r\n\r\n"
)
UNTIL_CLOSE = OK + b"content-type: Text/Event-Stream; charset=utf-8\r\n\r\nhello, world"


class Talk:
    """An engine of bytes, and a client of it."""

    def __init__(self, raw: RawEngine, upstream: Upstream, engine: Engine) -> None:
        self.raw = raw
        self.upstream = upstream
        self.engine = engine

    def ask(self, **changed: Any) -> Any:
        asked: dict[str, Any] = {"request_id": "q", "body": b"{}", "connect_s": 5.0} | changed
        asked["headers"] = ClientHeaders(asked.get("headers", []))
        return self.upstream.request(
            self.engine, asked.pop("method", "POST"), asked.pop("path_qs", "/v1/x"), **asked
        )

    async def read(self, **changed: Any) -> bytes:
        async with self.ask(**changed) as answer:
            return cast(bytes, await answer.read())


@asynccontextmanager
async def talk(answer: Answer, *, tls: ssl.SSLContext | None = None, **config: Any) -> AsyncIterator[Talk]:
    async with raw_engine(answer, tls=tls) as raw:
        engine = Engine(EngineConfig(url=raw.url + config.pop("prefix", ""), **config))
        upstream = Upstream()
        try:
            yield Talk(raw, upstream, engine)
        finally:
            await upstream.close()
            assert not upstream._pool.open


def closing(said: bytes) -> Callable[[Asked], Any]:
    async def answer(asked: Asked) -> None:
        asked.writer.write(said)
        await asked.writer.drain()
        asked.writer.close()

    return answer
