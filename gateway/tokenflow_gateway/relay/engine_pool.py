"""Connections to engines: made, lent to one request at a time, kept for the next."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from asyncio.staggered import staggered_race
from functools import cached_property, partial
from typing import NamedTuple, cast

from tokenflow_gateway.relay.coalescing import ReadCoalescing
from tokenflow_gateway.relay.engine_answer import EngineAnswer, KnownHead
from tokenflow_gateway.relay.errors import ConnectTimeout, EngineUnreachable, NoEngine

__all__ = ["EngineConnection", "EnginePool", "Origin"]

_KEEPALIVE_S = 2.0
"""Idle connections are dropped well before uvicorn drops them (5 s), so that none is used as it closes."""
_SWEEP_S = 0.5
"""Between two looks at them."""
_RECEIVE_BUFFER_BYTES = 32 * 1024
"""`SO_RCVBUF` of a connection, which Linux doubles: what one read of the socket can bring."""
_ADDRESSES_S = 10.0
"""How long the addresses of a name are believed."""
_NEXT_ADDRESS_S = 0.25
"""After so long without an answer the next address of a name is tried beside the ones before (RFC 8305)."""
_CLOSING_S = 1.0

_Address = tuple[socket.AddressFamily, tuple[object, ...]]


class Origin(NamedTuple):
    """What a connection leads to."""

    host: str
    port: int
    tls: bool


class EngineConnection(asyncio.Protocol):
    """One connection. A request and its answer at a time; whatever comes unasked ends it."""

    def __init__(self, pool: EnginePool, origin: Origin) -> None:
        self._pool = pool
        self._coalescing = pool.coalescing
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answer: EngineAnswer | None = None
        self.origin = origin
        self.idle_since = 0.0
        """By the loop's clock, where it is kept."""
        self.used = False
        """It has carried a whole exchange, so the engine may be about to close it."""

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, head: bytes, body: bytes | None, *, method: str) -> EngineAnswer:
        """Send a request in the next turn of the loop; its answer is to come.

        So it goes out behind what was posted on the engine's link before: see `link.client`.
        """
        assert self._answer is None
        if self._transport is None or self._transport.is_closing():
            raise EngineUnreachable("the connection to the engine was lost")
        answer = self._answer = EngineAnswer(
            self._loop,
            self._transport,
            to_head=method == "HEAD",
            known=self._pool.known_heads.get(self.origin),
        )
        self._coalescing.hold_off()
        self._loop.call_soon(self._write, answer, head, body)
        return answer

    def _write(self, answer: EngineAnswer, head: bytes, body: bytes | None) -> None:
        if answer is self._answer and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines((head, body) if body else (head,))

    def leave(self) -> None:
        """The exchange is over for the asker. An answer that is not here in full is broken off."""
        answer, self._answer = self._answer, None
        if answer is not None and answer.learned is not None:
            self._pool.known_heads[self.origin] = answer.learned
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        whole = answer is not None and answer.complete and answer.reusable
        if not whole or transport.get_write_buffer_size():
            transport.abort()
            return
        self.used = True
        self.idle_since = self._loop.time()
        self._pool.keep(self)

    def close(self) -> None:
        self._pool.drop(self)
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._coalescing.hold_off()  # who has waited for it is to go on
        self._pool.open.add(self)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None or not answer.received(data):
            self.close()
        elif answer.content.pass_by is None:
            self._coalescing.hold_off()  # a task is to go on with this
        elif not self._coalescing.armed:
            self._coalescing.arm()

    def eof_received(self) -> None:
        if self._answer is not None:
            self._answer.ended()
        else:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.drop(self)
        self._pool.open.discard(self)
        if self._answer is not None:
            self._answer.lost()
        self._pool.check_closed()


class EnginePool:
    """As many connections as there are requests under way, and those kept for the next."""

    def __init__(self, coalescing: ReadCoalescing | None = None) -> None:
        self.coalescing = coalescing or ReadCoalescing(0.0)
        self.open: set[EngineConnection] = set()
        self._kept: dict[Origin, list[EngineConnection]] = {}  # the one idle for longest first
        self._sweep: asyncio.TimerHandle | None = None
        self._addresses: dict[Origin, tuple[float, list[_Address]]] = {}
        self._all_closed: asyncio.Event | None = None
        self.known_heads: dict[Origin, KnownHead] = {}
        """How answers begin there: as the last one that was parsed."""

    def kept(self, origin: Origin) -> EngineConnection | None:
        """A connection that is here already, if there is one."""
        kept = self._kept.get(origin)
        while kept:
            connection = kept.pop()
            if connection.usable:
                return connection
        return None

    def drop_kept(self, origin: Origin) -> None:
        """The engine has closed one like them."""
        kept = self._kept.get(origin)
        while kept:
            kept.pop().close()

    async def new(self, origin: Origin, *, within_s: float) -> EngineConnection:
        """Raises `NoEngine` or, if it takes longer than `within_s`, `ConnectTimeout`."""
        self.coalescing.hold_off()
        try:
            async with asyncio.timeout(within_s):
                return await self._connect(origin)
        except TimeoutError as error:
            raise ConnectTimeout.after(within_s) from error
        except OSError as error:
            raise NoEngine("the engine cannot be reached") from error

    def keep(self, connection: EngineConnection) -> None:
        """For the next request."""
        self._kept.setdefault(connection.origin, []).append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_SWEEP_S, self._drop_idle)

    def drop(self, connection: EngineConnection) -> None:
        """It is not to be used again; harmless if it was not kept."""
        kept = self._kept.get(connection.origin)
        if kept and connection in kept:
            kept.remove(connection)

    async def close(self) -> None:
        """Break off whatever is open, and wait until it is gone."""
        if self._sweep is not None:
            self._sweep.cancel()
        if not self.open:
            return
        self._all_closed = asyncio.Event()
        for connection in list(self.open):
            connection.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_S):
                await self._all_closed.wait()

    def check_closed(self) -> None:
        """A connection is gone."""
        if self._all_closed is not None and not self.open:
            self._all_closed.set()

    # ---- inside --------------------------------------------------------------------------------------

    def _drop_idle(self) -> None:
        """Close those that nobody has used for a while, as long as any are kept."""
        self._sweep = None
        loop = asyncio.get_running_loop()
        idle_since = loop.time() - _KEEPALIVE_S
        for kept in self._kept.values():
            while kept and kept[0].idle_since <= idle_since:
                kept[0].close()
        if any(self._kept.values()):
            self._sweep = loop.call_later(_SWEEP_S, self._drop_idle)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    async def _connect(self, origin: Origin) -> EngineConnection:
        """To the first of its addresses that answers. Raises `OSError`."""
        sock = await _first_to_answer(await self._addresses_of(origin))
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: EngineConnection(self, origin),
                sock=sock,
                ssl=self._tls if origin.tls else None,
                server_hostname=origin.host if origin.tls else None,
            )
        except BaseException:
            sock.close()
            raise
        return connection

    async def _addresses_of(self, origin: Origin) -> list[_Address]:
        """The addresses of the host; a name's are kept for a while. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        until, known = self._addresses.get(origin, (0.0, []))
        if known and loop.time() < until:
            return known
        try:
            found = socket.getaddrinfo(  # a number in words asks nobody, so it does not wait
                origin.host, origin.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except socket.gaierror:
            found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        addresses: list[_Address] = [(family, address) for family, _, _, _, address in found]
        self._addresses[origin] = (loop.time() + _ADDRESSES_S, addresses)
        return addresses


async def _first_to_answer(addresses: list[_Address]) -> socket.socket:
    """Connected to one of them. Raises `OSError`."""
    if len(addresses) == 1:
        return await _connected_to(*addresses[0])
    attempts = [partial(_connected_to, *address) for address in addresses]
    sock: socket.socket | None
    sock, _, failures = await staggered_race(attempts, _NEXT_ADDRESS_S)
    if sock is None:
        raise next(filter(None, failures), OSError("the name has no address"))
    return sock


async def _connected_to(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
