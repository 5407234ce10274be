"""What the kernel knows of one client's connection: how far its bytes have come, and how far they may go.

Under other servers than ours, on other systems than Linux and on sockets that are no TCP there is no
`SocketMeter`, and nothing depends on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from typing import Self

import msgspec

__all__ = ["SocketMeter", "SocketReading", "parse_tcp_info"]

_TCP_INFO = struct.Struct("=120xQ16xI80xI")
"""Linux's ``struct tcp_info``: `tcpi_bytes_acked` at 120 (4.1), `tcpi_notsent_bytes` at 144 (4.6),
`tcpi_snd_wnd` at 228 (5.4)."""
_TCP_NOTSENT_LOWAT = 25
_UNSENT_BYTES = 1
"""`TCP_NOTSENT_LOWAT` of an event stream: the socket is writable once everything written has been sent."""


class SocketReading(msgspec.Struct, frozen=True, gc=False):
    """A connection at one moment. Counts of bytes are from its beginning."""

    acked: int
    """Arrived in the client's kernel, as far as is known here."""
    queued: int
    """In this kernel: sent and not acknowledged, or not sent."""
    buffered: int
    """In the server's own buffer."""
    notsent: int
    window: int
    """Bytes the client's kernel has room for: all there is to see of what the application has taken out."""

    @property
    def written(self) -> int:
        """Everything handed to the server so far."""
        return self.acked + self.queued + self.buffered

    @property
    def edge(self) -> int:
        """The window's right edge: never falls, and moves on as the application reads."""
        return self.acked + self.window


def parse_tcp_info(info: bytes, *, queued: int, buffered: int) -> SocketReading | None:
    """Read ``struct tcp_info``; None if this kernel's is too short to tell the window."""
    if len(info) < _TCP_INFO.size:
        return None
    acked, notsent, window = _TCP_INFO.unpack_from(info)
    return SocketReading(acked, queued, buffered, notsent, window)


class SocketMeter:
    """Reads one connection, and keeps what the server would hide of it small while events are streamed."""

    __slots__ = ("_kind", "_limits", "_out", "_socket", "_streams", "_transport")

    def __init__(self, transport: asyncio.Transport, sock: socket.socket) -> None:
        self._transport = transport
        self._socket = sock
        self._kind = int(sock.family), int(sock.type), sock.proto
        self._out = bytearray(4)
        self._limits = transport.get_write_buffer_limits()
        self._streams = 0

    @classmethod
    def of(cls, transport: asyncio.Transport) -> Self | None:
        """The meter of a connection; None where there is nothing to read."""
        sock = transport.get_extra_info("socket")
        if (
            sys.platform != "linux"
            or sock is None
            or sock.family not in (socket.AF_INET, socket.AF_INET6)
            or transport.get_extra_info("sslcontext") is not None
        ):
            return None
        return cls(transport, sock)

    def start(self) -> None:
        """Events are streamed from now on: what the client does not take is to wait in the gateway.

        `SO_SNDBUF` stays as it is: it bounds nothing that the window does not, and once set it can never grow
        again, which a large document on the same connection would pay for.
        """
        self._streams += 1
        if self._streams == 1 and not self._transport.is_closing():
            self._transport.set_write_buffer_limits(high=0)
            # asyncio leaves NODELAY off where the listener names no protocol
            self._set((socket.TCP_NODELAY, 1), (_TCP_NOTSENT_LOWAT, _UNSENT_BYTES))

    def stop(self) -> None:
        """The stream is over. With the last one (another may have begun) the connection is as it was."""
        self._streams -= 1
        if self._streams == 0 and not self._transport.is_closing():
            low, high = self._limits
            self._transport.set_write_buffer_limits(high=high, low=low)
            self._set((_TCP_NOTSENT_LOWAT, 0))

    def probe(self) -> SocketReading | None:
        """The connection now (two system calls, 6 us together); None once it is closed.

        An acknowledgement between the two calls makes `written` too small, never too large.
        """
        if self._transport.is_closing():
            return None
        try:
            bare = self._bare()
            try:
                info = bare.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                fcntl.ioctl(bare.fileno(), termios.TIOCOUTQ, self._out, True)
            finally:
                bare.detach()
        except (OSError, ValueError):
            return None
        queued = int.from_bytes(self._out, sys.byteorder, signed=True)
        return parse_tcp_info(info, queued=queued, buffered=self._transport.get_write_buffer_size())

    def acked(self) -> int | None:
        """Bytes that have arrived in the client's kernel, also of a connection that is closing."""
        try:
            bare = self._bare()
            try:
                info = bare.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            finally:
                bare.detach()
        except (OSError, ValueError):
            return None
        reading = parse_tcp_info(info, queued=0, buffered=0)
        return None if reading is None else reading.acked

    def _set(self, *options: tuple[int, int]) -> None:
        with contextlib.suppress(OSError, ValueError):
            bare = self._bare()
            try:
                for option, value in options:
                    bare.setsockopt(socket.IPPROTO_TCP, option, value)
            finally:
                bare.detach()

    def _bare(self) -> socket.SocketType:
        """The socket, to be detached again at once: what uvloop gives makes a costlier one for each call."""
        return socket.SocketType(*self._kind, self._socket.fileno())
