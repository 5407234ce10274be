"""The engine's end of the link: one background thread that owns the socket.

The scheduler thread may sit in a forward pass for seconds; gateways still get their pongs and statistics,
because this thread answers them. The two exchange through deques and never wait for each other:

- link to scheduler: `receive` takes deliveries; `for_scheduler` is readable while there are any;
- scheduler to link: `post` and `confirm` queue updates, `stats` is replaced as a whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import ceil
from typing import TextIO

import msgspec
import zmq

from tokenflow_engine.control.claim import claim
from tokenflow_engine.control.endpoint import curve_keys, is_encrypted
from tokenflow_engine.control.handshakes import HandshakeMonitor
from tokenflow_engine.control.outbox import Outbox
from tokenflow_engine.control.owners import Confirmation, Delivery, Lost, Owner, Replaced, Update
from tokenflow_engine.control.peers import Peers
from tokenflow_engine.control.ratelimit import Occasionally
from tokenflow_engine.control.wakeup import Wakeup
from tokenflow_engine.control.zap import ZAP_ENDPOINT, answer_zap
from tokenflow_engine.protocol import (
    MOST_IN_A_FRAME,
    EngineMessage,
    EngineStats,
    GatewayMessage,
    Hello,
    Ping,
    ProtocolError,
    Refused,
    Welcome,
    decode_gateway_messages,
    encode,
)

__all__ = ["LinkServer"]

_logger = logging.getLogger(__name__)

_STATS_EVERY_S = 0.2
"""What is not urgent is collected as often; each look takes the interpreter from the scheduler's thread."""
_AFTER_ERROR_S = 0.05
_MAX_FRAMES = 256
_MAX_QUEUED_MESSAGES = 100_000
_MAX_INBOX = 100_000
"""What may wait for the scheduler; a gateway that sends more is cut off until there is room again."""
_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Thirty thousand readings in one batch; a peer that sends more loses its connection."""

_Posted = tuple[Sequence[Update], bool] | Confirmation


class LinkServer:
    """Serves one engine's link from `start` to `close`.

    `stats` is what the scheduler thread last saw; `hook_errors` is asked each time statistics are sent.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        secret: str,
        welcome: Welcome,
        stats: EngineStats,
        hook_errors: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.stats = stats
        self.for_scheduler = Wakeup()
        self._welcome = welcome
        self._hook_errors = hook_errors
        self._clock = clock
        self._secret = secret
        self._peers = Peers(secret=secret)
        self._outbox = Outbox()
        self._inbox: deque[Delivery] = deque()
        self._posted: deque[_Posted] = deque()
        self._wakeup = Wakeup()
        self._refusals = Occasionally(every_s=10.0)
        self._failures = Occasionally(every_s=10.0)
        self._closing = False
        self._stats_due = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap: zmq.Socket[bytes] | None = None
        self._handshakes: HandshakeMonitor | None = None
        self._claim: TextIO | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._thread = threading.Thread(target=self._run, name="tokenflow-link", daemon=True)

    # ---- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind and serve. Nothing runs after an error.

        Raises `EndpointError` if another engine listens there, or where a socket's directory cannot be used,
        and `zmq.ZMQError` where the endpoint cannot be bound.
        """
        try:
            self._claim = claim(self.endpoint)
            self._bind()
        except BaseException:
            self._context.destroy(linger=0)
            self._release()
            raise
        self._thread.start()

    def close(self) -> None:
        """Stop serving and wait for the thread, if it runs; what is still queued is not sent."""
        self._closing = True
        self._wakeup.ring()
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=0)
        self._release()

    def _release(self) -> None:
        self._wakeup.close()
        self.for_scheduler.close()
        if self._claim is not None:
            self._claim.close()

    # ---- the scheduler thread ---------------------------------------------------------------------

    def receive(self, *, limit: int) -> list[Delivery]:
        """Up to `limit` deliveries, oldest first; never blocks."""
        self.for_scheduler.clear()
        taken: list[Delivery] = []
        while self._inbox and len(taken) < limit:
            taken.append(self._inbox.popleft())
        if self._inbox:
            self.for_scheduler.ring()
        return taken

    def post(self, updates: Sequence[Update], *, is_urgent: bool) -> None:
        """Queue updates for the gateways that own the streams; never blocks."""
        self._posted.append((updates, is_urgent))
        if is_urgent:
            self._wakeup.ring()

    def confirm(self, confirmation: Confirmation) -> None:
        """Queue the end of a closed stream, after all updates posted before; never blocks."""
        self._posted.append(confirmation)
        self._wakeup.ring()

    # ---- the link's thread ------------------------------------------------------------------------

    def _bind(self) -> None:
        self._socket.linger = 0
        self._socket.router_handover = True
        self._socket.sndhwm = self._socket.rcvhwm = _MAX_QUEUED_MESSAGES
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        if is_encrypted(self.endpoint):
            self._encrypt()
        self._socket.bind(self.endpoint)
        bound = self._socket.last_endpoint  # names the port where the endpoint left it open
        assert isinstance(bound, bytes)
        self.endpoint = bound.decode().rstrip("\0")

    def _encrypt(self) -> None:
        keys = curve_keys(self._secret, "engine")
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP_ENDPOINT)
        self._socket.curve_secretkey, self._socket.curve_publickey = keys.secret, keys.public
        self._socket.curve_server = True
        self._handshakes = HandshakeMonitor(self._socket)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in self._sources():
            poller.register(source, zmq.POLLIN)
        while not self._closing:
            try:
                poller.poll(self._timeout_ms())
                self._turn()
            except Exception:  # noqa: BLE001 - the thread outlives any one message
                self._failures.log(_logger, "turn", "TokenFlow link: an error was caught", exc_info=True)
                time.sleep(_AFTER_ERROR_S)

    def _sources(self) -> list[zmq.Socket[bytes] | int]:
        handshakes = None if self._handshakes is None else self._handshakes.socket
        sources = (self._socket, self._wakeup.fileno(), self._zap, handshakes)
        return [source for source in sources if source is not None]

    def _timeout_ms(self) -> int:
        now = self._clock()
        dues = [self._stats_due, self._outbox.next_due() or self._stats_due]
        return max(0, ceil((min(dues) - now) * 1000))  # rounded down, it would spin for the rest

    def _turn(self) -> None:
        now = self._clock()
        self._wakeup.clear()
        self._answer_handshakes()
        self._read_frames(now)
        self._collect(now)
        for owner, message in self._outbox.take_due(now=now, at=time.time()):
            self._send_to(owner, message)
        if now >= self._stats_due:
            self._beat(now)

    def _answer_handshakes(self) -> None:
        if self._zap is not None and self._zap.poll(0):
            answer_zap(self._zap, client_key=curve_keys(self._secret, "gateway").public)
        if self._handshakes is not None and self._handshakes.failures():
            line = (
                f"TokenFlow link: refused a peer at {self.endpoint}: it does not hold this engine's secret; "
                "give both sides the same TOKENFLOW_LINK_SECRET"
            )
            self._refusals.log(_logger, "handshake", line)

    def _read_frames(self, now: float) -> None:
        for _ in range(_MAX_FRAMES):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"messages are in one frame, not {len(frames)}")
                for message in decode_gateway_messages(frames[0]):
                    self._handle(identity, message, now)
            except ProtocolError as error:
                self._refuse(identity, Refused(code="bad_message", reason=str(error)), sender="a peer")

    def _handle(self, identity: bytes, message: GatewayMessage, now: float) -> None:
        if isinstance(message, Hello):
            self._greet(identity, message, now)
            return
        owner = self._peers.hear(identity, now=now)
        if owner is None:
            self._send(identity, Refused(code="hello_required", reason="say hello first"))
        elif isinstance(message, Ping):
            return
        elif self._is_full:
            self._cut_off(owner)
        else:
            self._deliver(Delivery(owner, message))

    def _greet(self, identity: bytes, hello: Hello, now: float) -> None:
        refusal = self._peers.admit(identity, hello, now=now)
        if refusal is not None:
            self._refuse(identity, refusal, sender=f"gateway {hello.gateway_id!r}")
            return
        owner = Owner(hello.gateway_id, hello.incarnation)
        if self._is_full:
            self._cut_off(owner)
            return
        _logger.info("TokenFlow link: gateway %r is connected", hello.gateway_id)
        self._deliver_replaced(owner)
        self._send(identity, self._welcome)

    def _refuse(self, identity: bytes, refusal: Refused, *, sender: str) -> None:
        line = f"TokenFlow link: refused {sender} ({refusal.code}): {refusal.reason}"
        self._refusals.log(_logger, f"{sender} {refusal.code}", line)
        self._send(identity, refusal)

    @property
    def _is_full(self) -> bool:
        return len(self._inbox) >= _MAX_INBOX

    def _cut_off(self, owner: Owner) -> None:
        """No answers, no statistics: to this gateway the link is down until a hello of it finds room."""
        self._peers.forget(owner)
        line = f"TokenFlow link: the scheduler takes nothing in; gateway {owner.gateway_id!r} is cut off"
        self._failures.log(_logger, "full", line)

    def _deliver_replaced(self, owner: Owner) -> None:
        gone = self._peers.newly_gone(owner.gateway_id)
        if gone:
            line = "TokenFlow link: an older process of gateway %r is gone: what it left running is aborted"
            _logger.info(line, owner.gateway_id)
            self._deliver(Delivery(owner, Replaced(owner.gateway_id, gone)))

    def _deliver(self, delivery: Delivery) -> None:
        self._inbox.append(delivery)
        self.for_scheduler.ring()

    def _collect(self, now: float) -> None:
        confirmed: defaultdict[Owner, list[EngineMessage]] = defaultdict(list)
        while self._posted:
            posted = self._posted.popleft()
            if isinstance(posted, Confirmation):
                states = self._outbox.take(posted.owner, at=time.time())
                confirmed[posted.owner] += (posted.message,) if states is None else (states, posted.message)
            else:
                updates, is_urgent = posted
                self._outbox.add(updates, is_urgent=is_urgent, now=now)
        for owner, messages in confirmed.items():
            self._send_to(owner, *messages)

    def _beat(self, now: float) -> None:
        self._stats_due = now + _STATS_EVERY_S
        for owner in self._peers.drop_silent(now):
            _logger.warning("TokenFlow link: gateway %r has gone silent; its streams go on", owner.gateway_id)
            self._deliver(Delivery(owner, Lost()))
            self._deliver_replaced(owner)
        stats = msgspec.structs.replace(self.stats, hook_errors=self._hook_errors())
        for identity in self._peers.identities():
            self._send(identity, stats)

    def _send_to(self, owner: Owner, *messages: EngineMessage) -> None:
        identity = self._peers.identity(owner)
        if identity is not None:
            self._send(identity, *messages)

    def _send(self, identity: bytes, *messages: EngineMessage) -> None:
        try:
            for at in range(0, len(messages), MOST_IN_A_FRAME):
                frame = encode(messages[at : at + MOST_IN_A_FRAME])
                self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            self._failures.log(_logger, "send", "TokenFlow link: a gateway does not read; messages are lost")
