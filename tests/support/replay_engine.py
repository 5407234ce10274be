"""An engine made of recordings: an HTTP/1.1 server that answers as it is told, byte for byte.

It runs in the test's own event loop at a free port. What it answers is chosen by the header ``x-replay`` or
by the ``model`` of the request, which name a `Script`; see `scenarios` for scripts made of recordings and
faults. What it saw is in `requests`::

    async with ReplayEngine({"m": replay(load("chat_stream"))}) as engine:
        ...                                     # talk to engine.base_url, model "m"
        seen = await engine.request(0)
        await seen.disconnected.wait()
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self, cast

import httptools

__all__ = [
    "Close",
    "Headers",
    "Hold",
    "Never",
    "Pause",
    "Raw",
    "ReplayEngine",
    "Reset",
    "Script",
    "SeenRequest",
    "Send",
    "Step",
]


@dataclass(frozen=True)
class Send:
    """Bytes of the body: one chunk of the transfer, one write. The first one sends the headers before it."""

    data: bytes

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("an empty chunk would end the body")


@dataclass(frozen=True)
class Raw:
    """Bytes of the connection, head and framing included: for answers that end anywhere in them."""

    data: bytes


@dataclass(frozen=True)
class Headers:
    """The status line and headers now, without any body yet."""


@dataclass(frozen=True)
class Pause:
    """Time between two writes."""

    seconds: float


@dataclass(frozen=True)
class Hold:
    """Wait until the test sets this event."""

    gate: asyncio.Event


@dataclass(frozen=True)
class Never:
    """Nothing more, with the connection open, until the client gives up."""


@dataclass(frozen=True)
class Close:
    """Close the connection without the end that the body should have (FIN)."""


@dataclass(frozen=True)
class Reset:
    """Cut the connection off (RST)."""


Step = Send | Raw | Headers | Pause | Hold | Never | Close | Reset


@dataclass(frozen=True, kw_only=True)
class Script:
    """An answer: chunked unless its headers have a content-length, ended as it should after the last step."""

    steps: Iterable[Step]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})


@dataclass(kw_only=True)
class SeenRequest:
    """One request as it arrived, and what became of it.

    `disconnected` is set when the client leaves before the answer is complete; `done` in every case, when
    nothing more will be sent. `sent_bytes` counts body bytes written.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    connection: int
    sent_bytes: int = 0
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def json(self) -> Any:
        """The body parsed. Raises `ValueError` if it is no JSON."""
        return json.loads(self.body)

    @property
    def script_name(self) -> str:
        """What the client asked for: ``x-replay``, the model, or else the path."""
        if name := self.headers.get("x-replay"):
            return name
        try:
            return str(self.json()["model"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.path


class ReplayEngine:
    """The server, an async context manager. `scripts` may be changed while it runs.

    A path can be a script's name, for requests without a model. A name without a script is answered by 404,
    ``/abort_request`` and the health checks by 200.
    """

    def __init__(
        self,
        scripts: Mapping[str, Script] | None = None,
        *,
        port: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        quiet = {path: _plain(200, "") for path in ("/abort_request", "/health", "/ready")}
        self.scripts: dict[str, Script] = {**quiet, **(scripts or {})}
        self.requests: list[SeenRequest] = []
        self.sleep = sleep
        self._port = port
        self._arrived = asyncio.Condition()
        self._connections: set[_Connection] = set()
        self._connection_count = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, "127.0.0.1", self._port, backlog=2048)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        answers = [connection.abort() for connection in list(self._connections)]
        await asyncio.gather(*(answer for answer in answers if answer), return_exceptions=True)
        await self._server.wait_closed()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def request(self, index: int) -> SeenRequest:
        """The request with this number, waiting until it has arrived."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) > index)
        return self.requests[index]

    def script_for(self, seen: SeenRequest) -> Script:
        name = seen.script_name
        known = self.scripts.get(name) or self.scripts.get(seen.path)
        return known or _plain(404, f"no script {name!r}; there are: {', '.join(self.scripts)}")

    async def saw(self, seen: SeenRequest) -> None:
        async with self._arrived:
            self.requests.append(seen)
            self._arrived.notify_all()

    def forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def _accept(self) -> _Connection:
        self._connection_count += 1
        connection = _Connection(self, number=self._connection_count)
        self._connections.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One client: parses its requests, one at a time, and lets an `_Answer` write."""

    transport: asyncio.Transport

    def __init__(self, engine: ReplayEngine, *, number: int) -> None:
        self._engine = engine
        self._number = number
        self._parser = httptools.HttpRequestParser(self)
        self._answer: asyncio.Task[None] | None = None
        self._seen: SeenRequest | None = None
        self.writable = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.transport.set_write_buffer_limits(
            high=0
        )  # `sent_bytes` is to stop soon after the client stops reading
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def eof_received(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.forget(self)
        if self._answer and not self._answer.done():
            assert self._seen
            self._seen.disconnected.set()
            self._answer.cancel()

    def abort(self) -> asyncio.Task[None] | None:
        """End the connection; the task to wait for, if an answer was being written."""
        self.transport.abort()
        if self._answer:
            self._answer.cancel()
        return self._answer

    # ---- callbacks of the parser ----

    def on_message_begin(self) -> None:
        self._target = self._body = b""
        self._headers: dict[str, str] = {}

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        assert self._answer is None or self._answer.done(), "requests are not to be pipelined"
        self._seen = SeenRequest(
            method=self._parser.get_method().decode(),
            path=self._target.decode().partition("?")[0],
            headers=self._headers,
            body=self._body,
            connection=self._number,
        )
        self._answer = asyncio.get_running_loop().create_task(self._respond(self._seen))

    async def _respond(self, seen: SeenRequest) -> None:
        try:
            await self._engine.saw(seen)
            script = self._engine.script_for(seen)
            await _Answer(self, script, seen, sleep=self._engine.sleep).play()
        finally:
            seen.done.set()


class _Answer:
    """Plays one script on one connection."""

    def __init__(
        self,
        connection: _Connection,
        script: Script,
        seen: SeenRequest,
        *,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._transport = connection.transport
        self._script = script
        self._seen = seen
        self._sleep = sleep
        self._chunked = "content-length" not in script.headers
        self._begun = False

    async def play(self) -> None:
        for step in self._script.steps:
            await self._take(step)
            if isinstance(step, Close | Reset):
                return
        self._begin()
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")

    async def _take(self, step: Step) -> None:
        match step:
            case Send(data):
                await self._send(data)
            case Raw(data):
                self._begun = True
                self._transport.write(data)
            case Headers():
                self._begin()
            case Pause(seconds):
                await self._sleep(seconds)
            case Hold(gate):
                await gate.wait()
            case Never():
                await self._until_client_left()
            case Close():
                self._transport.close()
            case Reset():
                self._reset()

    async def _send(self, data: bytes) -> None:
        await self._connection.writable.wait()
        self._begin()
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        self._seen.sent_bytes += len(data)
        await asyncio.sleep(0)  # an endless script must let the loop see that the client left
        if self._transport.is_closing():
            await self._until_client_left()

    @staticmethod
    async def _until_client_left() -> None:
        """Wait to be cancelled by the connection when it is lost."""
        await asyncio.get_running_loop().create_future()

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        status = HTTPStatus(self._script.status)
        headers = dict(self._script.headers)
        if self._chunked:
            headers["transfer-encoding"] = "chunked"
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._transport.write(f"HTTP/1.1 {status} {status.phrase}\r\n{fields}\r\n".encode("latin-1"))

    def _reset(self) -> None:
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def _plain(status: int, text: str) -> Script:
    headers = {"content-type": "text/plain", "content-length": str(len(text.encode()))}
    return Script(status=status, headers=headers, steps=[Send(text.encode())] if text else [])
