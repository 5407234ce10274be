"""The gateway's end of the link to one engine's plugin.

Callbacks of the event loop own the DEALER socket: they read it, say hello, ping and notice silence. A task
waits until that is over, and starts anew. Everybody else only queues messages, which never waits. Those of
one turn of the event loop go to zmq in one frame, as the next one begins, with those before that were not
urgent: to wake zmq's thread costs more than the messages. Requests to engines are written behind them, so
that a stream's announcement is ahead of its request. While the link is down messages are dropped: at the
next welcome the live streams are announced anew, and streams go on without a link as the stock engine
serves them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple, Protocol

import structlog
import zmq

from tokenflow_engine.control.endpoint import curve_keys, is_encrypted
from tokenflow_engine.protocol import (
    HEARTBEAT_S,
    LINK_TIMEOUT_S,
    MOST_IN_A_FRAME,
    PROTOCOL_VERSION,
    Aborted,
    Consumption,
    EngineMessage,
    EngineStats,
    GatewayMessage,
    Hello,
    Ping,
    ProtocolError,
    Refused,
    StreamClosed,
    StreamOpened,
    StreamState,
    StreamStates,
    Welcome,
    decode_engine_messages,
    encode,
)
from tokenflow_gateway.engines.engine import NOT_CONNECTED, Engine

__all__ = ["EngineLink", "LinkEvents", "LinkIdentity"]

_log = structlog.stdlib.get_logger("tokenflow.link")

RETRY_AFTER_REFUSAL_S = 5.0
"""A wrong secret or version does not get better by asking more often."""
_HELLO_EVERY_S = 0.25
_READABLE = int(zmq.POLLIN)  # a plain number: the enumeration's operators are slow
_MOST_IN_A_ROW = 20
"""Messages taken before everybody else has a turn; a frame is taken whole."""
_NOT_URGENT_S = 0.005
"""For a message that nobody waits for, until it goes by itself."""
_MAX_UNSENT = 10_000
"""Frames the socket may hold while the engine does not read; more are dropped, never waited for."""


class LinkEvents(Protocol):
    """What the gateway does with what engines say."""

    def announcements(self, engine: Engine) -> Iterable[GatewayMessage]:
        """What the engine has to be told after a (re)connect: the streams that are open or closing."""

    def on_states(self, engine: Engine, states: list[StreamState]) -> None:
        """Streams of ours changed."""

    def on_aborted(self, engine: Engine, aborted: Aborted) -> None:
        """The engine confirms that a closed stream is gone."""


class LinkIdentity(NamedTuple):
    """Who this gateway is (see `protocol.Hello`)."""

    gateway_id: str
    incarnation: str
    secret: str


class EngineLink:
    """Connects to one engine until cancelled, and keeps `engine.welcome`, `.stats` and `.link_reason`."""

    def __init__(
        self,
        engine: Engine,
        endpoint: str,
        identity: LinkIdentity,
        events: LinkEvents,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._identity = identity
        self._events = events
        self._context = context
        self._clock = clock
        self._socket: zmq.Socket[bytes] | None = None
        self._unsent: deque[GatewayMessage] = deque()
        self._sends_soon = False
        self._sends_later = False
        engine.tell = self.tell

    # ---- what streams call: never waits ----------------------------------------------------------

    def opened(self, message: StreamOpened) -> None:
        """Announce a stream. Its HTTP request is to follow, by `EngineConnection.ask`."""
        if self._engine.linked:
            self._post(message)

    def closed(self, rid: str, reason: str, *, urgent: bool) -> bool:
        """Tell the engine that the gateway is done with `rid`. False if there is no link to tell it over.

        `urgent`: the engine may be at work on it.
        """
        if not self._engine.linked:
            return False
        return self._post(StreamClosed(rid=rid, reason=reason), urgent=urgent)

    def consumed(self, message: Consumption) -> bool:
        """Tell the engine where readers are. False if there is no link to tell it over."""
        return self._engine.linked and self._post(message)

    def tell(self, message: GatewayMessage) -> bool:
        """Anything else, such as another policy. False if there is no link to tell it over."""
        return self._engine.linked and self._post(message)

    # ---- the task --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Hold the link until cancelled. A fault of ours costs the link, never a stream."""
        while True:
            try:
                pause_s = await self._one_connection()
            except (zmq.ZMQError, ProtocolError) as error:
                self._down(f"link failed: {error}")
                pause_s = HEARTBEAT_S
            except Exception:  # noqa: BLE001 - logged in full, and the next connection starts afresh
                _log.exception("fault in the link", engine=self._engine.name)
                self._down("link failed: see the gateway's log")
                pause_s = HEARTBEAT_S
            await asyncio.sleep(pause_s)

    async def _one_connection(self) -> float:
        """One socket's life. Returns how long to wait before the next."""
        self._socket = socket = self._new_socket()
        self._unsent.clear()
        self._stuck = False
        self._heard, self._spoken = self._clock(), -math.inf
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[float] = self._loop.create_future()
        fileno = socket.fileno()
        self._loop.add_reader(fileno, self._look)
        self._tick()
        try:
            return await self._over
        finally:
            self._ticker.cancel()
            self._loop.remove_reader(fileno)
            self._socket = None
            self._engine.welcome = None
            socket.close(linger=0)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_HELLO_EVERY_S, self._tick)
        self._look()

    def _look(self) -> None:
        """Take what has come, and speak if it is time. What goes wrong with that is the connection's end."""
        if self._socket is None or self._over.done():
            return
        try:
            pause_s = self._read(self._socket)
            if pause_s is None:
                self._keep_alive()
            elif not self._over.done():
                self._over.set_result(pause_s)
        except Exception as error:  # noqa: BLE001 - raised in the task, which waits for it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The connection is over; the task begins another."""
        if not self._over.done():
            self._over.set_exception(error)

    def _new_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, _MAX_UNSENT)
        socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for an engine that is not there
        socket.set(zmq.RECONNECT_IVL, 100)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        if is_encrypted(self._endpoint):
            ours = curve_keys(self._identity.secret, "gateway")
            socket.curve_secretkey, socket.curve_publickey = ours.secret, ours.public
            socket.curve_serverkey = curve_keys(self._identity.secret, "engine").public
        socket.connect(self._endpoint)
        return socket

    def _keep_alive(self) -> None:
        """Say hello until welcomed, ping afterwards, and notice silence."""
        now = self._clock()
        if now - self._heard > LINK_TIMEOUT_S:
            self._silent()
        if now - self._spoken < (HEARTBEAT_S if self._engine.linked else _HELLO_EVERY_S):
            return
        self._spoken = now
        if self._engine.linked:
            self._post(Ping())
        else:
            self._say_hello()

    def _silent(self) -> None:
        if self._engine.linked:
            self._down("the plugin has gone silent")
        elif self._engine.link_reason == NOT_CONNECTED:
            hint = "" if not is_encrypted(self._endpoint) else ", or its TOKENFLOW_LINK_SECRET is another one"
            self._down(f"no plugin answers at {self._endpoint}{hint}")

    def _read(self, socket: zmq.Socket[bytes]) -> float | None:
        """Act on what is here. Refused for good: how long to wait before the next connection.

        Read without zmq.asyncio, whose futures cost more than the messages. The descriptor tells of changes
        only, and sending may swallow one: hence the look at the socket's events, there as here.
        """
        taken = 0
        while taken < _MOST_IN_A_ROW:
            if not int(socket.get(zmq.EVENTS)) & _READABLE:
                return None
            messages = decode_engine_messages(socket.recv(zmq.NOBLOCK))
            self._heard = self._clock()
            taken += max(1, len(messages))
            for message in messages:
                refused = self._take(message)
                if refused is None:
                    continue
                if refused.code != "hello_required":
                    self._down(f"refused: {refused.reason}")
                    return RETRY_AFTER_REFUSAL_S
                self._engine.welcome = None  # it has restarted, and does not know us
        self._loop.call_soon(self._look)  # others have their turn first
        return None

    def _say_hello(self) -> None:
        identity = self._identity
        self._post(
            Hello(
                version=PROTOCOL_VERSION,
                gateway_id=identity.gateway_id,
                incarnation=identity.incarnation,
                secret=identity.secret,
            )
        )

    def _take(self, message: EngineMessage) -> Refused | None:
        """Act on one message. Returns it if it is a refusal."""
        if isinstance(message, EngineStats):
            self._engine.stats = message
            self._engine.load.note_stats(message, self._clock())
        elif isinstance(message, StreamStates):
            self._events.on_states(self._engine, message.states)
        elif isinstance(message, Aborted):
            self._events.on_aborted(self._engine, message)
        elif isinstance(message, Welcome):
            self._up(message)
        else:
            return message
        return None

    def _up(self, welcome: Welcome) -> None:
        if welcome.version != PROTOCOL_VERSION:
            self._down(
                f"the engine's plugin speaks protocol {welcome.version}, this gateway {PROTOCOL_VERSION}: "
                "install the same release of tokenflow-serving on both sides"
            )
            return
        if self._engine.welcome is None or self._engine.welcome.engine_id != welcome.engine_id:
            _log.info("linked", engine=self._engine.name, with_engine=welcome.engine, model=welcome.model)
        self._engine.welcome = welcome
        self._engine.link_reason = None
        for message in self._events.announcements(self._engine):
            self._post(message)

    def _down(self, reason: str) -> None:
        if self._engine.link_reason != reason:
            _log.warning("not linked", engine=self._engine.name, endpoint=self._endpoint, reason=reason)
        self._engine.welcome = None
        self._engine.link_reason = reason
        self._engine.load.forget()

    def _post(self, message: GatewayMessage, *, urgent: bool = True) -> bool:
        """Hand a message to the socket in the next turn of the loop, or a little later, or drop it.

        Never waits. What was not dropped keeps its order and is sent, unless the link goes down.
        """
        if self._socket is None:
            return False
        if self._stuck and not self._flush():
            self._engine.link_dropped += not isinstance(message, Hello)
            return False
        if urgent and not self._sends_soon:
            self._sends_soon = True
            self._loop.call_soon(self._send_soon)
        elif not (urgent or self._sends_later):
            self._sends_later = True
            self._loop.call_later(_NOT_URGENT_S, self._send_later)
        self._unsent.append(message)
        return True

    def _send_soon(self) -> None:
        self._sends_soon = False
        self._send()

    def _send_later(self) -> None:
        self._sends_later = False
        self._send()

    def _send(self) -> None:
        """What was posted before this turn of the loop."""
        if self._socket is not None and self._unsent:
            self._flush()

    def _flush(self) -> bool:
        """Give the socket what was posted. False if it does not take it all now: the engine does not read."""
        assert self._socket is not None
        try:
            self._stuck = not _all_sent(self._socket, self._unsent)
            if int(self._socket.get(zmq.EVENTS)) & _READABLE:
                self._loop.call_soon(self._look)
        except Exception as error:  # noqa: BLE001 - what cannot be sent is not tried again: see `_fail`
            self._fail(error)
            return False
        return not self._stuck


def _all_sent(socket: zmq.Socket[bytes], unsent: deque[GatewayMessage]) -> bool:
    """Whether the socket takes all of it now, in order."""
    try:
        while unsent:
            batch = list(islice(unsent, MOST_IN_A_FRAME))
            socket.send(encode(batch), zmq.NOBLOCK)
            for _ in batch:
                unsent.popleft()
    except zmq.Again:
        return False
    return True
