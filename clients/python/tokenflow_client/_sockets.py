"""Connections whose receive buffer is small from the start, so that TCP itself shows how far they are read.

`socket_options` of httpx are set after the connection is made. By then the server has been promised a window
of 64 kB, which cannot be taken back: the kernel drops what does not fit into the smaller buffer, and after a
pause the stream stands still for seconds, until the server sends it again. So the connection is made here.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Callable, Iterable
from typing import Any

from tokenflow_client._library import Library

__all__ = ["keep_receive_buffer_small"]

_Options = Iterable[tuple[Any, ...]] | None


def keep_receive_buffer_small(transport: Any, library: Library, *, size_bytes: int, is_async: bool) -> bool:
    """Make an `HTTPTransport` of the library's connect with ``SO_RCVBUF`` set; False if that is impossible.

    It reaches into the transport for its pool: httpx takes no network backend, the pool below it does. A
    version that is built otherwise keeps the system's buffers, and everything else works.
    """
    pool = getattr(transport, "_pool", None)
    backend = getattr(pool, "_network_backend", None)
    make = _async_backend if is_async else _sync_backend
    small = backend and make(library, backend, size_bytes)
    if not small:
        return False
    pool._network_backend = small  # type: ignore[union-attr]
    return True


class _SmallBuffers:
    """What both backends share; everything but TCP goes to the library's own backend."""

    def __init__(self, library: Library, inner: Any, size_bytes: int, wrap: Callable[[Any], Any]) -> None:
        self._core = library.core
        self._inner = inner
        self._size_bytes = size_bytes
        self._wrap = wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _socket(self, family: int, local_address: str | None, options: _Options) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._size_bytes)
            for option in options or ():
                sock.setsockopt(*option)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if local_address is not None:
                sock.bind((local_address, 0))
        except OSError:
            sock.close()
            raise
        return sock


class _SyncBackend(_SmallBuffers):
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: _Options = None,
    ) -> Any:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return self._wrap(self._first(addresses, timeout, local_address, socket_options))
        except TimeoutError as error:
            raise self._core.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise self._core.ConnectError(str(error)) from error

    def _first(
        self, addresses: list[Any], timeout: float | None, local: str | None, options: _Options
    ) -> Any:
        failure = OSError("the host name has no address")
        for family, _, _, _, address in addresses:
            try:
                sock = self._socket(family, local, options)
            except OSError as error:
                failure = error
                continue
            try:
                sock.settimeout(timeout)
                sock.connect(address)
            except OSError as error:
                sock.close()
                failure = error
            else:
                return sock
        raise failure


class _AsyncBackend(_SmallBuffers):
    """Under asyncio; other libraries keep the system's buffers."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is the library's
        local_address: str | None = None,
        socket_options: _Options = None,
    ) -> Any:
        loop = _asyncio_loop()
        if loop is None:
            return await self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        try:
            async with asyncio.timeout(timeout):
                addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                return await self._wrap(await self._first(addresses, local_address, socket_options))
        except TimeoutError as error:
            raise self._core.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise self._core.ConnectError(str(error)) from error

    async def _first(self, addresses: list[Any], local: str | None, options: _Options) -> socket.socket:
        failure = OSError("the host name has no address")
        for family, _, _, _, address in addresses:
            try:
                sock = self._socket(family, local, options)
            except OSError as error:
                failure = error
                continue
            try:
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, address)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise failure


def _asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """The running loop; None under another library, such as trio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _sync_backend(library: Library, inner: Any, size_bytes: int) -> Any:
    stream = _class_of(library, "sync", "SyncStream")
    return stream and _SyncBackend(library, inner, size_bytes, stream)


def _async_backend(library: Library, inner: Any, size_bytes: int) -> Any:
    stream = _class_of(library, "anyio", "AnyIOStream")
    sockets = importlib.import_module("anyio.abc").SocketStream
    if stream is None or not hasattr(sockets, "from_socket"):  # an older anyio
        return None

    async def wrap(sock: socket.socket) -> Any:
        return stream(await sockets.from_socket(sock))

    return _AsyncBackend(library, inner, size_bytes, wrap)


def _class_of(library: Library, module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"{library.core.__name__}._backends.{module}"), name, None)
    except ImportError:
        return None
