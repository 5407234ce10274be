"""A client on a plain socket that reads when it is told to."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

__all__ = ["StallingClient", "stalling_client"]

_RECEIVE_BUFFER_BYTES = 4096


class StallingClient:
    """Sends one streaming request. `body` is what has been read of the answer, without its framing."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._raw = bytearray()
        self.ended = False
        """The connection was closed or cut off."""

    @property
    def body(self) -> bytes:
        _, _, rest = bytes(self._raw).partition(b"\r\n\r\n")
        parts = []
        while match := re.match(rb"([0-9a-f]+)\r\n", rest):
            size = int(match[1], 16)
            parts.append(rest[match.end() : match.end() + size])
            rest = rest[match.end() + size + 2 :]
        return b"".join(parts)

    @property
    def complete(self) -> bool:
        """Whether the answer came to its proper end."""
        return self._raw.endswith(b"0\r\n\r\n")

    async def read(self, size: int = 1 << 16) -> bytes:
        """What is there, at least a byte of it; empty at the end of the connection."""
        try:
            data = await asyncio.get_running_loop().sock_recv(self._sock, size)
        except ConnectionError:
            data = b""
        self._raw += data
        self.ended = not data
        return data

    async def read_all(self) -> bytes:
        """The body to the end of the answer or of the connection."""
        while not self.ended and not self.complete:
            await self.read()
        return self.body


@asynccontextmanager
async def stalling_client(
    base_url: str, path: str, request: object, *, headers: Mapping[str, str] | None = None
) -> AsyncIterator[StallingClient]:
    """A client with a small receive buffer that has sent `request` and reads nothing yet."""
    address = urlsplit(base_url)
    body = json.dumps(request).encode()
    head = {"host": address.netloc, "content-type": "application/json", "content-length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**head, **(headers or {})}.items())
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (address.hostname, address.port))
        await loop.sock_sendall(sock, f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        yield StallingClient(sock)
