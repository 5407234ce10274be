"""A thousand cheap clients in one event loop: they count tokens and note the time between them."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from array import array
from collections.abc import Awaitable, Iterable, Sequence
from typing import Self, cast
from urllib.parse import urlsplit

__all__ = ["ReportSender", "StreamClient", "all_of"]

_END = b"\n\n"
_seqs = itertools.count(1)
"""Whoever sends it, a report has to be newer than the last one of its stream."""


class StreamClient(asyncio.Protocol):
    """One streamed chat on a raw socket. `recording` says whether gaps between tokens are kept."""

    def __init__(self, url: str, *, model: str) -> None:
        self._address = urlsplit(url)
        body = json.dumps(
            {"model": model, "stream": True, "messages": [{"role": "user", "content": "Go on."}]}
        )
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = (head + body).encode()
        self._head = bytearray()
        self._last = b""
        self._at_s = 0.0
        self.answered = asyncio.get_running_loop().create_future()
        """The stream's id and capability, once the first token is here."""
        self.recording = False
        self.gaps_s = array("d")
        self.tokens = 0
        self.lost = False

    async def connect(self, *, receive_buffer_bytes: int | None = None) -> Self:
        """Send the request; the buffer is set before the connection is made."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (self._address.hostname, self._address.port))
        await loop.create_connection(lambda: self, sock=sock)
        return self

    def stop_reading(self) -> None:
        """From now on everything stays where it is."""
        self._transport.pause_reading()

    def close(self) -> None:
        self._transport.abort()

    # ---- callbacks of the loop ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        events = data.count(_END) + (self._last == b"\n" and data[:1] == b"\n")
        self._last = data[-1:]
        if not self.answered.done():
            self._read_head(data)
        if not events:
            return
        if self.recording and self._at_s:
            self.gaps_s.append(now - self._at_s)
            self.gaps_s.extend([0.0] * (events - 1))
        self._at_s = now
        self.tokens += events

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.answered.done():
            self.answered.set_exception(RuntimeError(f"not answered: {bytes(self._head[:100])!r}"))

    def _read_head(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" not in self._head:
            return
        lines = self._head.split(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        fields = (line.partition(": ") for line in lines[1:])
        key = {name.lower(): value for name, _, value in fields}.get("x-tokenflow-stream")
        if " 200 " not in lines[0] or key is None:
            self.answered.set_exception(RuntimeError(f"not answered: {lines[0]}"))
        else:
            stream, _, capability = key.partition(".")
            self.answered.set_result((stream, capability))


class ReportSender:
    """Progress reports over one connection, one at a time. A gateway closes what idles for five seconds."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._writer.close()

    async def send(self, client: StreamClient, *, paused: bool) -> None:
        """Where this client's reader is. Raises `RuntimeError` if it is not taken."""
        stream, capability = client.answered.result()
        report = {"seq": next(_seqs), "tokens": client.tokens, "paused": paused}
        body = json.dumps({"capability": capability, "reports": [report]})
        self._writer.write(
            f"POST /v1/streams/{stream}/progress HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        await self._reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
        if " 200 " not in head[:20]:
            raise RuntimeError(f"a report was refused: {head[:40]}")

    async def send_for(self, clients: Sequence[StreamClient], *, per_s: float, seconds: float) -> int:
        """Reports of one after the other at this rate; how many."""
        begun, sent = time.monotonic(), 0
        while time.monotonic() < begun + seconds:
            await self.send(clients[sent % len(clients)], paused=False)
            sent += 1
            await asyncio.sleep(max(begun + sent / per_s - time.monotonic(), 0.0))
        return sent


async def all_of(work: Iterable[Awaitable[object]], *, within_s: float) -> None:
    """Wait for all; raises the first failure, or `TimeoutError`."""
    async with asyncio.timeout(within_s):
        await asyncio.gather(*work)
