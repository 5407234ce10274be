"""uvicorn's HTTP protocol with bounds on what a client may do before it is known what it wants."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, cast

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn._types import ASGI3Application, ASGISendEvent, HTTPScope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tokenflow_gateway.readers.transport import SocketMeter
from tokenflow_gateway.relay.dialects import dialect_of
from tokenflow_gateway.relay.errors import RelayError, TooManyConnections, error_body
from tokenflow_gateway.relay.exchange import CONNECTION, Exchange, has_body
from tokenflow_gateway.relay.guard import ClientGone
from tokenflow_gateway.relay.head import Head

__all__ = ["HEAD_TIMEOUT_S", "MAX_HEAD_BYTES", "SPARE_CONNECTIONS", "BoundedHttpProtocol", "GatewayState"]

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers; a longer head is answered 431. So are trailers and chunk extensions."""
HEAD_TIMEOUT_S = 20.0
"""From the connection, or the first byte of a further request, to the end of its head."""
SPARE_CONNECTIONS = 64
"""Beyond the limit, so many may wait for their answer that there are too many; others are cut off at once."""
_REFUSED_S = 2.0
"""For such a connection to send its request."""
_REFUSED_BODY_BYTES = 1024 * 1024
_LOOKS = 4
"""How often a connection that does not take its answer is looked at, within the time it has for that."""
_FRAMING = (b"content-length", b"transfer-encoding")
_LENGTH = re.compile(rb"\r\ncontent-length: *", re.IGNORECASE)
_LENGTH_DIGITS = 10
_HEADS_LEARNED = 4
"""Of a connection, in a row without a request that has one of them again: its heads all differ, then."""
_UNUSUAL = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
"""Headers of requests that the parser looks at in any case."""

_OK = b"HTTP/1.1 200 OK\r\n"
_NO_PIPELINE: deque[tuple[RequestResponseCycle, ASGI3Application]] = deque()
"""One for all: a request that comes too early is not queued, and an empty queue takes 700 bytes."""


def _refusal(status: bytes, message: str) -> bytes:
    """The answer to what never becomes a request."""
    body = error_body(message, status=400)
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


_TOO_LARGE = _refusal(b"431 Request Header Fields Too Large", "the request's headers are too large")
_NO_REQUEST = _refusal(b"400 Bad Request", "this is no HTTP request that can be understood")


class _Known(NamedTuple):
    """A request's head, for the next one that differs in nothing but its length."""

    before: bytes
    """Its bytes up to the value of ``content-length``."""
    after: bytes
    """Those behind."""
    scope: dict[str, Any]
    """What is in its extensions is there for all requests with this head."""
    length_at: int
    """Where ``content-length`` is among its headers."""

    @classmethod
    def of(cls, data: bytes, cycle: RequestResponseCycle) -> _Known | None:
        """What has come with `data`, which has some of its body too; None for a head that is not simple."""
        head = data[: len(data) - len(cycle.body)]
        names = [name for name, _ in cycle.scope["headers"]]
        lengths = _LENGTH.findall(head)
        is_all = head.find(b"\r\n\r\n") == len(head) - 4
        simple = is_all and len(lengths) == names.count(b"content-length") == 1
        if not simple or not cycle.keep_alive or _UNUSUAL.intersection(names):
            return None
        before, _, after = head.partition(lengths[0])
        before += lengths[0]
        digits = len(after) - len(after.lstrip(b"0123456789"))
        return cls(before, after[digits:], {**cycle.scope}, names.index(b"content-length"))

    def split(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Length, in digits, and body of a whole request with this head; None for anything else."""
        at = len(self.before)
        if not data.startswith(self.before):
            return None
        end = data.find(b"\r", at, at + _LENGTH_DIGITS)
        length, body_at = data[at:end], end + len(self.after)
        if not length.isdigit() or not data.startswith(self.after, end):
            return None
        return (length, data[body_at:]) if len(data) - body_at == int(length) else None


class GatewayState(ServerState):
    """What the connections of one server share: their set, and its bounds."""

    def __init__(
        self,
        *,
        max_connections: int,
        max_hold_s: float,
        on_refused: Callable[[], None] = lambda: None,
        on_request: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.max_connections = max_connections
        self.max_hold_s = max_hold_s
        """A connection that takes nothing of what waits for it is cut off after this long."""
        self.on_refused = on_refused
        """Called for each connection beyond."""
        self.on_request = on_request
        """Called for each request, before its task has its first turn."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Bounds connections in number, heads in bytes and time, and clients that do not take their answers.

    It serves one request at a time.
    A client that sends a further request before it has its answer gets that answer, and then the connection
    is closed: uvicorn would stop reading, and so never see that the client has left. An offer to upgrade to
    another protocol is not taken up, which leaves the request what it is (RFC 9110, 7.8).
    """

    server_state: GatewayState

    def __init__(
        self,
        config: Config,
        server_state: GatewayState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.writable = True
        self.gives_up = False
        self.head: Head | None = None
        self._known: _Known | None = None
        self._to_learn = _HEADS_LEARNED
        self.pipeline = _NO_PIPELINE
        self._on_lost: Callable[[], None] | None = None
        self._unsent_head = b""  # of the answer that has begun: it leaves with the first of its body
        self._head_within_s = HEAD_TIMEOUT_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - self.server_state.max_connections
        if excess > 0:
            self.server_state.on_refused()
            self.app, self._head_within_s = _too_many, _REFUSED_S
        if excess > SPARE_CONNECTIONS:
            transport.abort()
        self.meter = SocketMeter.of(transport)
        self._deaf = False
        self._in_head = True
        self._head_bytes = 0
        self._body_follows = False  # of a request that offers an upgrade, behind which the parser stops
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0  # by the loop's clock; while no request is under way
        self._flush_timer: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._flushed()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)
        if self._on_lost is not None:
            self._on_lost()

    def data_received(self, data: bytes) -> None:
        if self._deaf or (self._known is not None and self._comes_again(self._known, data)):
            return
        before, self._head_bytes = self.cycle, self._head_bytes + len(data)
        whole = self._head_bytes == len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(_NO_REQUEST)
            return
        if self._deaf:
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)
        elif self._head_timer is None and self._waits_for_head() and not self.transport.is_closing():
            self._expect_head()
        is_next = before is not None and self.cycle is not before and not self._head_bytes
        if whole and is_next and self._to_learn:
            self._to_learn -= 1
            self._known = _Known.of(data, self.cycle)

    def _comes_again(self, known: _Known, data: bytes) -> bool:
        """Take a whole request with the head of one before, without the parser. False if it is none."""
        before = self.cycle
        is_next = before.response_complete and not before.more_body  # answered, and all of it here
        if self._head_bytes or not is_next or self.transport.is_closing():
            return False
        if (found := known.split(data)) is None:
            return False
        self._to_learn = _HEADS_LEARNED
        length, body = found
        headers = known.scope["headers"].copy()
        headers[known.length_at] = (b"content-length", length)
        self.gives_up = False
        self.cycle = RequestResponseCycle(
            scope=cast(HTTPScope, known.scope | {"headers": headers, "state": self.app_state.copy()}),
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )
        self.cycle.body += body
        self.cycle.more_body = False
        self.cycle.message_event.set()
        self._start_asgi_task(self.cycle, self.app)
        return True

    def _waits_for_head(self) -> bool:
        """Whether the rest of one is to come, or all of it."""
        return self._in_head or self.cycle.response_complete

    def _feed(self, data: bytes) -> None:
        """To the parser, which would leave HTTP with a request that offers an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._body_follows:
                self._expect_body()
            if rest := data[offer.args[0] :]:
                self._feed(rest)

    def _expect_body(self) -> None:
        """Have a parser that goes on with the body of this request, as its head frames it."""
        self._body_follows = False
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self.parser = httptools.HttpRequestParser(self)
        self._deaf = True  # to the callbacks: it is not another request
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
        self._deaf = False

    def _refuse(self, answer: bytes) -> None:
        """Answer what is no request, and close. In the middle of an answer there is no place to say so."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        self.transport.write(answer)
        self._close()

    # ---- for the server ----------------------------------------------------------------------------

    def close_if_idle(self) -> None:
        """Close the connection between two requests; one under way, or whose head has begun, is answered."""
        if self.cycle is None or self._head_bytes:
            return
        if self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    # ---- for the relay: see `relay.exchange.ClientConnection` -----------------------------------

    def pause_writing(self) -> None:
        self.writable = False
        super().pause_writing()
        self._expect_flush()

    def resume_writing(self) -> None:
        self.writable = True
        super().resume_writing()
        if not self.transport.is_closing():
            self._flushed()

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        self._on_lost = on_lost
        if on_lost is None:
            return
        self.flow.resume_reading()  # a large body has stopped it, and who does not read sees nobody leave
        if self.cycle.disconnected:
            self.loop.call_soon(on_lost)

    def take_body(self) -> bytes | None:
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def begin(
        self, fixed: bytes, headers: Iterable[tuple[bytes, bytes]], send: Send, *, with_next: bool
    ) -> bool:
        cycle = self.cycle
        if send != cycle.send or not self.writable or cycle.response_started or cycle.disconnected:
            return False
        if cycle.scope["http_version"] != "1.1" or cycle.scope["method"] == "HEAD":
            return False
        lines = [_OK, fixed]
        lines += [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
        if (b"connection", b"close") in cycle.default_headers:  # the server's: it is closing
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"transfer-encoding: chunked\r\n\r\n")
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.chunked_encoding = True
        if with_next:
            self._unsent_head = b"".join(lines)
        else:
            self.transport.write(b"".join(lines))
        return True

    @property
    def lost(self) -> bool:
        return self.cycle.disconnected

    @property
    def framed(self) -> asyncio.Transport | None:
        return self.transport if self.cycle.chunked_encoding and not self._unsent_head else None

    def write(self, data: bytes) -> None:
        cycle = self.cycle
        if cycle.disconnected or cycle.response_complete:
            return
        if cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._unsent_head:
            data, self._unsent_head = self._unsent_head + data, b""
        self.transport.write(data)

    def end(self, data: bytes) -> bool:
        cycle = self.cycle
        if not (self.writable and cycle.chunked_encoding):
            return False
        if cycle.disconnected or cycle.response_complete:
            return False
        rest = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        self.transport.write(self._unsent_head + rest)
        self._unsent_head = b""
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def abort(self) -> None:
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            cycle.send = _until_close(cycle)  # type: ignore[method-assign, assignment]
        self.server_state.on_request()
        super()._start_asgi_task(cycle, app)

    # ---- callbacks of the parser -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._deaf:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._deaf = True
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self.scope.setdefault("extensions", {})[CONNECTION] = self  # type: ignore[assignment]
        self._in_head = True
        self.gives_up = False

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._deaf or not self._in_head:  # a trailer, which is no header (RFC 9110, 6.5.1)
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if not self._deaf:
            self._head_is_here()
            super().on_headers_complete()
            self._body_follows = self.parser.should_upgrade() and has_body(self.headers)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._deaf and not self._body_follows:
            super().on_message_complete()
            self._head_bytes = 0

    # ---- times that nobody else keeps --------------------------------------------------------------

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._head_within_s, self._close)

    def _head_is_here(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close(self) -> None:
        """Once all has been taken that waits."""
        self.transport.close()
        self._expect_flush()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._expect_flush()
            return
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_idle)

    def _look_idle(self) -> None:
        """Close a connection that has brought no request for a while: one timer for all its requests."""
        self._idle_timer = None
        if self.transport.is_closing() or not self.cycle.response_complete or self._head_timer is not None:
            return
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._idle_timer = self.loop.call_later(left_s, self._look_idle)
        else:
            self._close()

    def _expect_flush(self) -> None:
        if self._flush_timer is None and self.transport.get_write_buffer_size():
            self._look_later(self._taken(), _LOOKS)

    def _look_later(self, taken: int, looks: int) -> None:
        every_s = self.server_state.max_hold_s / _LOOKS
        self._flush_timer = self.loop.call_later(every_s, self._look, taken, looks - 1)

    def _look(self, before: int, looks: int) -> None:
        """`before`: what was taken at the last look; `looks`: so many more may find the same."""
        taken = self._taken()
        if taken > before or (self.gives_up and not self.cycle.response_complete):
            looks = _LOOKS
        if looks:
            self._look_later(taken, looks)
        else:
            self.transport.abort()

    def _taken(self) -> int:
        """What grows while the client takes something.

        The kernel's count, where it tells: its buffer asks for more only once a third of it, maybe a MB, is
        free.
        """
        acked = None if self.meter is None else self.meter.acked()
        return -self.transport.get_write_buffer_size() if acked is None else acked

    def _flushed(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer to a request on a connection beyond the limit."""
    exchange = Exchange(scope, receive, send)
    error = TooManyConnections("the gateway has as many connections as it may have: try again")
    with contextlib.suppress(ClientGone, RelayError):
        await exchange.read_body(_REFUSED_BODY_BYTES, within_s=_REFUSED_S)
    await exchange.fail(error, dialect_of(exchange.path).error_body(error))


_ENDLESS = 1 << 62


def _until_close(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """`send` for HTTP/1.0, which knows no chunks: a body without a length ends with the connection."""
    send, endless = cycle.send, False

    async def send_until_close(message: ASGISendEvent) -> None:
        nonlocal endless
        if message["type"] == "http.response.start":
            endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if endless:
                cycle.chunked_encoding, cycle.expected_content_length = False, _ENDLESS
        elif endless and message["type"] == "http.response.body" and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_until_close
