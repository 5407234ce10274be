"""A gateway's end of the link as tests want it: synchronous, one message at a time, nothing hidden."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from tokenflow_engine.control.endpoint import CurveKeys, curve_keys
from tokenflow_engine.protocol import (
    PROTOCOL_VERSION,
    Aborted,
    EngineMessage,
    GatewayMessage,
    Hello,
    Ping,
    StreamClosed,
    StreamOpened,
    StreamStates,
    decode_engine_messages,
    encode,
)

__all__ = ["RawLink"]

M = TypeVar("M", bound=EngineMessage)
_PATIENCE_S = 30.0


class RawLink:
    """One DEALER. Use as a context manager; everything received is kept in `received`, in order."""

    def __init__(
        self,
        endpoint: str,
        *,
        secret: str,
        gateway_id: str = "test",
        incarnation: str = "1",
        curve: CurveKeys | None = None,
    ) -> None:
        self.received: list[EngineMessage] = []
        self._identity = (gateway_id, incarnation, secret)
        self._ping_at = time.monotonic() + 1.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        if curve is not None:
            self._socket.curve_secretkey, self._socket.curve_publickey = curve.secret, curve.public
            self._socket.curve_serverkey = curve_keys(secret, "engine").public
        self._socket.connect(endpoint)

    def __enter__(self) -> RawLink:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Vanish without a word, as a gateway that is killed."""
        self._context.destroy(linger=0)

    def send(self, message: GatewayMessage) -> None:
        """Send one message."""
        self._socket.send(encode([message]))

    def send_bytes(self, frame: bytes) -> None:
        """Send what need not be a message."""
        self._socket.send(frame)

    def hello(self, *, version: int = PROTOCOL_VERSION) -> EngineMessage:
        """Say hello; the engine's answer."""
        gateway_id, incarnation, secret = self._identity
        self.send(Hello(version=version, gateway_id=gateway_id, incarnation=incarnation, secret=secret))
        return self.wait(lambda m: type(m).__name__ in ("Welcome", "Refused"), what="an answer to the hello")

    def open(self, rid: str) -> None:
        """Announce a stream."""
        self.send(StreamOpened(rid=rid, at=time.time()))

    def close_stream(self, rid: str) -> None:
        """Be done with a stream."""
        self.send(StreamClosed(rid=rid, reason="test"))

    def ping(self) -> None:
        """Be alive."""
        self._ping_at = time.monotonic() + 1.0
        self.send(Ping())

    def next(self, kind: type[M], *, timeout_s: float = _PATIENCE_S) -> M:
        """The next message of this kind to arrive from now on."""
        found = self.wait(lambda m: isinstance(m, kind), timeout_s=timeout_s, what=kind.__name__)
        assert isinstance(found, kind)
        return found

    def next_aborted(self, rid: str, *, timeout_s: float = _PATIENCE_S) -> Aborted:
        """The next confirmation for `rid`."""
        found = self.wait(
            lambda m: isinstance(m, Aborted) and m.rid == rid, timeout_s=timeout_s, what=f"Aborted({rid})"
        )
        assert isinstance(found, Aborted)
        return found

    def until_state(self, rid: str, *states: str, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until the last the engine has said of the stream is one of `states`."""

        def says_so() -> bool:
            history = self.history(rid)
            return bool(history) and history[-1][0] in states

        self.listen_until(says_so, timeout_s=timeout_s, what=f"{rid} {'/'.join(states)}")

    def history(self, rid: str) -> list[tuple[str, int]]:
        """What was said about a stream so far: states and counts."""
        batches = [m for m in self.received if isinstance(m, StreamStates)]
        return [(s.state, s.generated) for batch in batches for s in batch.states if s.rid == rid]

    def wait(
        self, wanted: Callable[[EngineMessage], bool], *, timeout_s: float = _PATIENCE_S, what: str
    ) -> EngineMessage:
        """The first wanted message from now on."""
        seen = len(self.received)
        found: list[EngineMessage] = []

        def came() -> bool:
            nonlocal seen
            found.extend(m for m in self.received[seen:] if wanted(m))
            seen = len(self.received)
            return bool(found)

        self.listen_until(came, timeout_s=timeout_s, what=what)
        return found[0]

    def listen_until(self, condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
        """Receive, and ping once a second, until `condition` holds; AssertionError when time is up."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}; {self.received[-5:]}"
            if self._socket.poll(50):
                self.received += decode_engine_messages(self._socket.recv())
            if time.monotonic() > self._ping_at:
                self.ping()
