"""ZeroMQ's authentication requests (RFC 27), answered in the poll loop of the socket they concern."""

from __future__ import annotations

import hmac

import zmq
from zmq.utils import z85

__all__ = ["ZAP_ENDPOINT", "answer_zap"]

ZAP_ENDPOINT = "inproc://zeromq.zap.01"


def answer_zap(socket: zmq.Socket[bytes], *, client_key: bytes) -> None:
    """Answer one request waiting on `socket`: only the holder of `client_key` (Z85) may connect."""
    version, request_id, _domain, _address, _identity, mechanism, *credentials = socket.recv_multipart()
    is_known = (
        mechanism == b"CURVE"
        and len(credentials) == 1
        and hmac.compare_digest(credentials[0], z85.decode(client_key))
    )
    status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
    socket.send_multipart([version, request_id, *status, b"gateway" if is_known else b"", b""])
