"""Mock engine and its clients in one process, on one epoll: what is sent and what has arrived are one story.

Raw non-blocking sockets, because the driver must cost less than whatever it measures: about 7 us a chunk, for
the client's read and the engine's write together. `Driver.step` does what is ready; the scenarios call it.
"""

from __future__ import annotations

import re
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from tokenflow_bench.gateway import events

__all__ = ["Client", "Driver", "EngineStream"]

_READ_BYTES = 256 * 1024
_SEND_BUFFER_BYTES = 64 * 1024
_STREAM = re.compile(rb"stream (\d+)")
_ANSWER = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_DOCUMENTS = {
    b"/v1/models": {
        "object": "list",
        "data": [{"id": events.MODEL, "object": "model", "owned_by": "sglang", "max_model_len": 32768}],
    },
    b"/model_info": {"model_path": events.MODEL, "is_generation": True},
    b"/get_model_info": {"model_path": events.MODEL, "is_generation": True},
    b"/server_info": {"model_path": events.MODEL, "served_model_name": events.MODEL, "version": "0.5.23"},
    b"/get_server_info": {"model_path": events.MODEL, "served_model_name": events.MODEL, "version": "0.5.23"},
}


class EngineStream:
    """One stream on the engine's side."""

    def __init__(self, connection: _EngineConnection, number: int, *, with_usage: bool) -> None:
        self._connection = connection
        self.number = number
        self.with_usage = with_usage
        self.sent = 0
        """Content events."""
        self.ended = False
        """The gateway has closed the connection, or the answer is complete."""
        self._chunk = _framed(events.content(1000, with_usage=with_usage))

    def begin(self) -> None:
        """Status, headers, and the event with the role."""
        self._connection.send(_ANSWER + _framed(events.opening()))

    def send(self) -> None:
        """One more token, always of the same bytes."""
        self.sent += 1
        self._connection.send(self._chunk)

    def send_some(self) -> int:
        """As much as the connection takes now, of chunks without end; bytes taken."""
        return self._connection.send_more(self._chunk * 64)

    def finish(self) -> None:
        """The rest of the answer."""
        self.ended = True
        self._connection.send(_framed(events.DONE) + b"0\r\n\r\n")


class _EngineConnection:
    def __init__(self, driver: Driver, sock: socket.socket) -> None:
        self._driver = driver
        self.sock = sock
        self._read = b""
        self._unsent = b""
        self.stream: EngineStream | None = None

    def ready(self) -> None:
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._driver.forget(self.sock)
            if self.stream is not None and not self.stream.ended:
                self.stream.ended = True
                self._driver.on_abort(self.stream)
            return
        self._read += data
        while self.sock.fileno() >= 0 and (request := self._request()) is not None:
            self._answer(*request)

    def _request(self) -> tuple[bytes, bytes] | None:
        head, blank, rest = self._read.partition(b"\r\n\r\n")
        if not blank:
            return None
        lowered = head.lower()
        if b"transfer-encoding: chunked" in lowered:
            body, end, rest = rest.partition(b"0\r\n\r\n")
            if not end:
                return None
            self._read = rest
            return head, body
        found = re.search(rb"content-length: *(\d+)", lowered)
        length = int(found[1]) if found else 0
        if len(rest) < length:
            return None
        self._read = rest[length:]
        return head, rest[:length]

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"PRI "):  # of HTTP/2, which some try first
            self._driver.forget(self.sock)
            return
        method, path, _ = head.split(b" ", 2)
        named = _STREAM.search(body)
        if method == b"POST" and path.endswith(b"/chat/completions") and named:
            self.stream = EngineStream(
                self, int(named[1]), with_usage=b'"continuous_usage_stats":true' in body.replace(b" ", b"")
            )
            self._driver.on_ask(self.stream)
            return
        document = msgspec.json.encode(_DOCUMENTS.get(path.partition(b"?")[0], {}))
        self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(document), document)
        )

    def send(self, data: bytes) -> None:
        """All of it; what the connection does not take now goes first the next time."""
        data = self._unsent + data
        self._unsent = data[self._taken(data) :]

    def send_more(self, data: bytes) -> int:
        """What is left over from before, or else of `data`; bytes taken now."""
        data = self._unsent or data
        taken = self._taken(data)
        self._unsent = data[taken:]
        return taken

    def _taken(self, data: bytes) -> int:
        try:
            return self.sock.send(data)
        except OSError:  # full, or the other side is gone, which its reading tells
            return 0


class Client:
    """A client's connection to a gateway. `on_events(client, count)` is called as events arrive."""

    def __init__(
        self, driver: Driver, port: int, *, key: str = events.KEY, receive_buffer: int | None = None
    ) -> None:
        self._driver = driver
        self._key = key
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.connect(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        driver.watch(self.sock, self.ready)
        self.number = 0
        self.engine: EngineStream | None = None
        self.events = 0
        self.answered = False
        """The answer is here in full."""
        self.failed = False
        self.sent_at: deque[float] = deque()
        """When the events under way left the engine, where that is noted."""
        self.on_events: Callable[[Client, int], None] = lambda client, count: None
        self._tail = b""

    def ask(self) -> None:
        """Request a stream of its own."""
        self.number = self._driver.number(self)
        self.engine, self.answered = None, False
        self._tail = b""
        body = (
            b'{"model":"bench","stream":true,"max_tokens":1000000,"messages":[{"role":"user",'
            b'"content":"Tell me a long story. This is stream %d."}]}' % self.number
        )
        self.sock.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: bench\r\naccept: */*\r\n"
            b"content-type: application/json\r\nauthorization: Bearer %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (self._key.encode(), len(body), body)
        )

    def close(self) -> None:
        self._driver.forget(self.sock)

    def deafen(self) -> None:
        """Read nothing from now on."""
        self._driver.unwatch(self.sock)

    def ready(self) -> None:
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.failed = not self.answered
            self.answered = True
            self._driver.forget(self.sock)
            return
        count = data.count(b"\n\n")
        if self._tail.endswith(b"\n") and data.startswith(b"\n"):
            count += 1
        self._tail = data[-8:] if len(data) >= 8 else (self._tail + data)[-8:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self.answered = True
        if count:
            self.events += count
            self.on_events(self, count)


class Driver:
    """The mock engine listens on `port`. Scenarios set `on_ask` and `on_abort`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[], None]] = {}
        self._sockets: set[socket.socket] = set()
        self._clients: dict[int, Client] = {}
        self._next = 0
        self.on_ask: Callable[[EngineStream], object] = self.pair
        self.on_abort: Callable[[EngineStream], None] = lambda stream: None
        self.watch(self._listener, self._accept)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_exc: object) -> None:
        for sock in list(self._sockets):
            self.forget(sock)
        self._epoll.close()

    def number(self, client: Client) -> int:
        """A number for a request of this client."""
        self._next += 1
        self._clients[self._next] = client
        return self._next

    def pair(self, stream: EngineStream) -> Client | None:
        """Bring the engine's side of a stream and its client together, and begin the answer."""
        client = self._clients.pop(stream.number, None)
        if client is not None:
            client.engine = stream
            stream.begin()
        return client

    def step(self, timeout_s: float = 0.0) -> None:
        """Do what is ready."""
        for fd, _ in self._epoll.poll(timeout_s):
            handler = self._ready.get(fd)
            if handler is not None:
                handler()

    def until(self, condition: Callable[[], bool], *, within_s: float) -> bool:
        """Run until `condition` holds; False when time is up."""
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.step(0.005)
        return True

    def run_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.step(min(left, 0.05))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer by itself inside, on a thread: while programs are started that look for an engine."""
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                self.step(0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def watch(self, sock: socket.socket, handler: Callable[[], None]) -> None:
        self._sockets.add(sock)
        self._ready[sock.fileno()] = handler
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def unwatch(self, sock: socket.socket) -> None:
        if self._ready.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def forget(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self.unwatch(sock)
            self._sockets.discard(sock)
            sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.watch(sock, _EngineConnection(self, sock).ready)


def _framed(data: bytes) -> bytes:
    """As a chunk of HTTP's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)
