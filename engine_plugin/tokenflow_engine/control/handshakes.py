"""Connections that were refused below the messages: the wrong secret under CURVE, or no encryption at all."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["HandshakeMonitor"]

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class HandshakeMonitor:
    """ZeroMQ's reports on one socket; `socket` is readable while there are any. Closed with its context."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(_FAILED)

    def failures(self) -> int:
        """How many handshakes have failed since the last call; never blocks."""
        count = 0
        while self.socket.poll(0):
            recv_monitor_message(self.socket)
            count += 1
        return count
