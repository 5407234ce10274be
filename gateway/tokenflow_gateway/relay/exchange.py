"""One client's request and the answer to it, over raw ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from starlette.types import Receive, Scope, Send

from tokenflow_gateway.readers.transport import SocketMeter
from tokenflow_gateway.relay.errors import BodyTooLarge, RelayError, RequestTooSlow
from tokenflow_gateway.relay.guard import ClientGone
from tokenflow_gateway.relay.upstream import Header

if TYPE_CHECKING:
    from tokenflow_gateway.relay.head import Head
    from tokenflow_gateway.telemetry.traces import RequestTrace

__all__ = [
    "CONNECTION",
    "SEEN",
    "STREAM_HEADER",
    "STREAM_HEADERS",
    "ClientConnection",
    "Exchange",
    "SeenHead",
    "has_body",
    "take_the_rest",
]

CONNECTION: Final = "tokenflow.connection"
"""The client's connection in the extensions of the ASGI scope, where the server gives it."""
SEEN: Final = "tokenflow.seen"
"""Beside it: what an `Exchange` has made of the head. Requests of one connection with the very same head have
the same extensions: for all but the first it is there already."""

STREAM_HEADER: Final = b"x-tokenflow-stream"
"""The stream's id and capability; see docs/progress.md."""

STREAM_HEADERS: Final[tuple[Header, ...]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
"""What keeps proxies and compressors in between from holding events back."""

_OF_ONE_REQUEST: Final = frozenset({b"content-length", b"x-request-id"})
"""Headers that `Exchange.headers` is without, so that those of a client's requests are the same."""
_STREAM_LINES: Final = b"".join(b"%b: %b\r\n" % header for header in STREAM_HEADERS)
_LINGER_S = 2.0
"""How long the rest of a refused body is taken."""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class SeenHead(NamedTuple):
    """What an exchange makes of the headers of a request."""

    headers: list[Header]
    """All but those of this request alone."""
    request_id: str | None
    """The client's ``x-request-id`` if it is one we can log and send on."""

    @classmethod
    def of(cls, headers: list[Header]) -> SeenHead:
        given = next(
            (value for name, value in headers if name == b"x-request-id" and _REQUEST_ID.fullmatch(value)),
            None,
        )
        return cls(
            [header for header in headers if header[0] not in _OF_ONE_REQUEST],
            None if given is None else given.decode("latin-1"),
        )


class ClientConnection(Protocol):
    """What `http_protocol` tells of a client's connection, and lets the relay do with it."""

    writable: bool
    """Whether a write now would go through without waiting."""
    lost: bool
    """The client has left before the end of its answer; what is written goes nowhere."""
    gives_up: bool
    """The relay itself gives a client up that takes nothing of this answer."""

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Call this once the client has left (soon, if it has); None: not any more."""

    def take_body(self) -> bytes | None:
        """The request's body, if all of it is here."""

    def begin(self, fixed: bytes, headers: Iterable[Header], send: Send, *, with_next: bool) -> bool:
        """Begin an answer of status 200 in chunks. False if its headers must go by `send`.

        They must if it is not the connection's own: somebody in between may add to them. `fixed`: the lines
        of headers that are the same in all such answers, beside `headers`. `with_next`: they wait for `write`
        or `end`, which comes next.
        """

    @property
    def framed(self) -> asyncio.WriteTransport | None:
        """Where HTTP chunks of the body may be written as such; None if the answer is not in chunks."""

    def write(self, data: bytes) -> None:
        """A part of the body of an answer that has begun; only while `writable`."""

    def end(self, data: bytes) -> bool:
        """The last part, and the end of the answer. False if it must be sent in the ordinary way."""

    head: Head | None
    """Of its last request, which the next one may have again."""

    @property
    def meter(self) -> SocketMeter | None:
        """What the kernel tells of it, where it tells something."""

    def abort(self) -> None:
        """Cut the connection off, with all that waits in it."""


class Exchange:
    """Reads the body, and writes the answer in order: `start`, `write`..., `finish`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        extensions = scope.setdefault("extensions", {})
        self.connection: ClientConnection | None = extensions.get(CONNECTION)
        seen: SeenHead | None = extensions.get(SEEN)
        if seen is None:
            seen = extensions[SEEN] = SeenHead.of(scope["headers"])
        self.headers: list[Header] = seen.headers
        self.request_id = seen.request_id or f"req-{random.getrandbits(128):032x}"  # a name, and no secret
        self.status: int | None = None
        """Status of the answer, once it has begun."""
        self.streaming = False
        """The answer is a stream of events, so that an error can still be told in it."""
        self.complete = False
        """The answer has come to its end: nothing more can be told."""
        self.trace: RequestTrace | None = None
        """Where telemetry is on."""
        self.on_over: Callable[[], None] | None = None
        """See `over`."""
        self.own_headers: list[Header] = []
        """What each answer says beside its own headers, whatever it is."""
        self._body_read = False

    @property
    def peer(self) -> str | None:
        """The address at the other end of the connection; None where it has none."""
        client = self.scope.get("client")
        return client[0] if client else None

    @property
    def path_qs(self) -> str:
        """Path and query as the client sent them."""
        raw = self.scope.get("raw_path") or self.path.encode()
        query: bytes = self.scope["query_string"]
        return (raw + (b"?" + query if query else b"")).decode("latin-1")

    async def read_body(self, limit_bytes: int, *, within_s: float) -> bytes:
        """The whole request body. Raises `BodyTooLarge`, `RequestTooSlow` or `ClientGone`.

        One that announces itself as too large is not waited for.
        """
        body = None if self.connection is None else self.connection.take_body()
        if body is None:
            if _length(self.scope["headers"]) > limit_bytes:
                raise _too_large(limit_bytes)
            try:
                async with asyncio.timeout(within_s):
                    body = await self._read_body(limit_bytes)
            except TimeoutError as error:
                raise RequestTooSlow(f"the request body did not arrive within {within_s:g} s") from error
        self._body_read = True
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        return body

    async def _read_body(self, limit_bytes: int) -> bytes:
        parts, size = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        self.status = status
        headers = list(headers)
        self.streaming = STREAM_HEADERS[0] in headers
        await self._start(headers)

    async def start_events(self, headers: Iterable[Header], *, with_next: bool = False) -> None:
        """A stream of events begins; from here on the client's time is the caller's to keep.

        `with_next`: `write_now` or `finish_now` comes next, and the head may leave with that.
        """
        self.status, self.streaming = 200, True
        begun = self.connection is not None and self.connection.begin(
            _STREAM_LINES, (*headers, *self._own), self._send, with_next=with_next
        )
        if not begun:
            await self._start((*STREAM_HEADERS, *headers))
        if self.connection is not None:
            self.connection.gives_up = True

    @property
    def _own(self) -> tuple[Header, ...]:
        return *self.own_headers, (b"x-request-id", self.request_id.encode("latin-1"))

    async def _start(self, headers: Iterable[Header]) -> None:
        start = {"type": "http.response.start", "status": self.status, "headers": [*headers, *self._own]}
        await self._send(start)

    @property
    def writable(self) -> bool:
        """Whether `write_now` may be called: the connection takes more, the answer has not ended."""
        return self.connection is not None and self.connection.writable and not self.complete

    @property
    def transport(self) -> asyncio.WriteTransport | None:
        """Where framed chunks of the answer may be written; None where that cannot be."""
        return None if self.connection is None or self.complete else self.connection.framed

    @property
    def meter(self) -> SocketMeter | None:
        """What the kernel tells of the client's connection, where it tells something."""
        return None if self.connection is None else self.connection.meter

    @property
    def lost(self) -> bool:
        """Whether the client is known to have left: what is written goes nowhere."""
        return self.connection is not None and self.connection.lost

    async def write(self, data: bytes) -> None:
        """Hand bytes to the server; waits while the client's connection is full."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def write_now(self, data: bytes) -> None:
        """The same without waiting; only while `writable`."""
        assert self.connection is not None
        self.connection.write(data)

    async def finish(self, data: bytes = b"") -> None:
        if not self.finish_now(data):
            await self._send({"type": "http.response.body", "body": data})
            self.complete = True

    def finish_now(self, data: bytes) -> bool:
        """The same without waiting. False where that cannot be, and nothing was done."""
        ended = self.connection is not None and self.connection.end(data)
        self.complete = self.complete or ended
        return ended

    def over(self) -> None:
        """The client has its answer, or gets no more of it: who counts it is told, once."""
        on_over, self.on_over = self.on_over, None
        if on_over is not None:
            on_over()

    async def break_off(self) -> None:
        """Leave the answer unfinished, in a way that a client which does not read cannot hold up."""
        if self.connection is None:
            return
        self.connection.abort()
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        """A whole JSON answer at once."""
        await self.start(status, [*_json_headers(body), *headers])
        await self.finish(body)

    async def fail(self, error: RelayError, body: bytes) -> None:
        """The answer is an error, `body` what it says; only before `start`."""
        if self._body_read or not has_body(self.scope["headers"]):
            await self.answer(error.status, body, error.headers())
            return
        headers = [*_json_headers(body), (b"connection", b"close"), *error.headers()]
        await self.start(error.status, headers)
        await self.write(body)
        await take_the_rest(self.receive)
        await self.finish()


async def take_the_rest(receive: Receive) -> None:
    """Take a refused body for a while: a client that is cut off while it sends may never see its answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body"):
                pass


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {limit_bytes} bytes")


def _json_headers(body: bytes) -> list[Header]:
    return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]


def has_body(headers: Iterable[Header]) -> bool:
    """Whether more of a message follows its head."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in headers
    )


def _length(headers: Iterable[Header]) -> int:
    """What ``content-length`` announces; 0 where nothing does."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
