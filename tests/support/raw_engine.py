"""An engine of plain bytes: a server that answers each request on a connection as a script says."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

__all__ = ["Asked", "RawEngine", "raw_engine"]


@dataclass
class Asked:
    """One request as it came, and the connection to answer on."""

    head: bytes
    body: bytes
    connection: int
    """Number of its connection, from 0."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass
class RawEngine:
    url: str
    connections: int = 0
    open_connections: int = 0
    asked: list[Asked] = field(default_factory=list)


Answer = Callable[[Asked], Awaitable[None] | bytes]
"""What is answered: bytes, or whatever it does itself with the connection."""


@asynccontextmanager
async def raw_engine(answer: Answer, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawEngine]:
    """Serve until the block ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = engine.connections
        engine.connections += 1
        engine.open_connections += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while not writer.is_closing():
                    asked = await _request(reader, writer, number)
                    engine.asked.append(asked)
                    said = answer(asked)
                    if isinstance(said, bytes):
                        writer.write(said)
                        await writer.drain()
                    else:
                        await said
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()
            engine.open_connections -= 1

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    engine = RawEngine(f"{'https' if tls else 'http'}://127.0.0.1:{port}")
    try:
        yield engine
    finally:
        server.close()
        for _ in range(200):
            if not engine.open_connections:
                break
            await asyncio.sleep(0.005)
        await server.wait_closed()


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> Asked:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return Asked(head, await reader.readexactly(length), number, reader, writer)
