"""A client on one connection of its own, that can stop reading, read on, and vanish."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

__all__ = ["SocketClient"]

_RESETS = struct.pack("ii", 1, 0)


class SocketClient(asyncio.Protocol):
    """Sends one request and takes the answer; see `ask`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.headers: dict[str, str] = {}
        self.complete = False
        """The answer has come to its proper end."""
        self.begun = asyncio.Event()
        """The answer's head is here."""
        self.got_text = asyncio.Event()
        """Some of its body is."""
        self.ended = asyncio.Event()
        """The connection is closed, by whomever."""

    @classmethod
    async def ask(
        cls,
        base_url: str,
        path: str,
        request: object,
        *,
        headers: Mapping[str, str] | None = None,
        receive_buffer: int = 0,
        send_body: bool = True,
        connected: socket.socket | None = None,
    ) -> SocketClient:
        """A client that has sent `request`, as JSON, or only the head of it; reading goes on by itself.

        `connected`: a connection to use, which does not block.
        """
        address = urlsplit(base_url)
        loop = asyncio.get_running_loop()
        sock = connected or socket.socket()
        if connected is None:
            sock.setblocking(False)
            if receive_buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await loop.sock_connect(sock, (address.hostname, address.port))
        _, client = await loop.create_connection(cls, sock=sock)
        body = json.dumps(request).encode()
        fields = {
            "host": address.netloc,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **(headers or {}),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        client.send(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode())
        if send_body:
            client.send(body)
        return client

    def send(self, data: bytes) -> None:
        """Nothing, once the connection is closed."""
        if not self._transport.is_closing():
            self._transport.write(data)

    @property
    def status(self) -> int | None:
        """Of the answer, once it has begun."""
        return self._parser.get_status_code() if self.begun.is_set() else None

    def stop_reading(self) -> None:
        self._transport.pause_reading()

    def read_on(self) -> None:
        self._transport.resume_reading()

    def reset(self) -> None:
        """Vanish (RST)."""
        if not self._transport.is_closing():
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
            self._transport.abort()

    def close(self) -> None:
        """Leave in order (FIN)."""
        self._transport.close()

    # ---- asyncio.Protocol and the parser's callbacks ---------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.begun.set()

    def on_body(self, data: bytes) -> None:
        self.body += data
        self.got_text.set()

    def on_message_complete(self) -> None:
        self.complete = True
