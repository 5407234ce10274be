"""A client that reads at a pace of its own from a plain socket, so that its true position is known."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from support.replay_engine import Pause, Script, Send, Step

__all__ = ["PacedClient", "events", "paced_client"]

CHAT = "/v1/chat/completions"
_RECEIVE_BYTES = 4096


def events(count: int, *, per_s: float, at_once: int = 1) -> Script:
    """An engine's stream of so many tokens, about 200 bytes each; `at_once` of them in one write."""

    def steps() -> Iterator[Step]:
        burst = b""
        for number in range(count):
            delta = {"content": f" w{number:04d}"}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = {"id": "c" * 20, "object": "chat.completion.chunk", "created": 1, "model": "m" * 20}
            burst += b"data: " + json.dumps(chunk | {"choices": [choice]}).encode() + b"\n\n"
            if (number + 1) % at_once == 0:
                yield Send(burst)
                yield Pause(at_once / per_s)
                burst = b""

    return Script(steps=steps())


class PacedClient:
    """Takes `per_s` events a second out of its socket, or all there are (None); nothing while `paused`."""

    def __init__(self, sock: socket.socket, *, per_s: float | None) -> None:
        self._sock = sock
        self._rest = b""
        self.per_s = per_s
        self.paused = False
        self.position = 0
        """Events taken so far."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            while self.paused:
                await asyncio.sleep(0.01)
                due = loop.time()
            await self._take_event()
            if self.per_s is not None:
                due += 1 / self.per_s
                await asyncio.sleep(due - loop.time())

    async def _take_event(self) -> None:
        size = _RECEIVE_BYTES if self.per_s is None else 64
        while b"\n\n" not in self._rest.partition(b'"content"')[2]:
            received = await asyncio.get_running_loop().sock_recv(self._sock, size)
            if not received:
                await asyncio.Event().wait()  # the end of the answer is not its business
            self._rest += received
        self._rest = self._rest.partition(b'"content"')[2].partition(b"\n\n")[2]
        self.position += 1


@asynccontextmanager
async def paced_client(
    base_url: str, *, model: str, per_s: float | None, receive_buffer: int = 0, headers: str = ""
) -> AsyncIterator[PacedClient]:
    """A client with a stream of `model` that has begun; it leaves at the end of the block."""
    loop = asyncio.get_running_loop()
    body = json.dumps({"model": model, "stream": True, "messages": []})
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {len(body)}\r\n\r\n"
    with socket.socket() as sock:
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await loop.sock_connect(sock, ("127.0.0.1", int(base_url.rpartition(":")[2])))
        await loop.sock_sendall(sock, (head + body).encode())
        seen = b""
        while not seen.endswith(b"\r\n\r\n"):
            seen += await loop.sock_recv(sock, 1)
        assert b" 200 " in seen, seen
        client = PacedClient(sock, per_s=per_s)
        reading = asyncio.create_task(client.run())
        try:
            yield client
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
