"""One stream's text on its way to the client: handed over at once where it can be, else in a bounded queue.

The engine is read, parsed and counted by the request's own task, which calls `put`. A second task writes, but
only while something waits: for the client's connection to take more or, in a paced stream, for the reader to
need it. What has not been handed over lies here, where it is counted, and not in the server or the kernel.
"""

from __future__ import annotations

import asyncio
import math
import time
from asyncio import WriteTransport
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType

from tokenflow_gateway.config import DeliverySettings
from tokenflow_gateway.relay.backlog import Backlog
from tokenflow_gateway.relay.errors import ClientTooSlow
from tokenflow_gateway.relay.exchange import Exchange
from tokenflow_gateway.relay.guard import ClientGone
from tokenflow_gateway.relay.meter import Piece
from tokenflow_gateway.relay.pacer import Pacer
from tokenflow_gateway.relay.stream import Stream

__all__ = ["Delivery"]

_WRITE_BYTES = 16 * 1024
"""The most that is handed over in one write, and so the most that waits in the server's own buffer."""
_LOOK_AGAIN_S = 0.25
"""A wait for the reader is looked at again after this long: pauses may end without a word."""
_LARGE_EVENT_S = 1.0
"""Under ``at_cap: abort``, for the connection to go on with an event that alone is larger than the cap."""
_LAST_PATIENCE_S = 60.0
"""The most that a client which takes nothing, or a paced reader, is waited for once a stream has failed."""


class _Signal:
    """An event for one waiter, small while nobody waits: `asyncio.Event` takes a kilobyte for its queue."""

    __slots__ = ("_is_set", "_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        if self._is_set:
            return
        assert self._waiter is None
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Delivery:
    """Context manager around one stream's way to its client. Nothing is written after it is left.

    Order is kept. A piece leaves as a whole, in several writes if it is large. With a `pacer`, text is handed
    over when the reader needs it; pieces without text wait only for those before them. A reader who has
    paused for `max_hold_s` gets what waits, and what comes until his pause is over.
    """

    def __init__(
        self, exchange: Exchange, stream: Stream, settings: DeliverySettings, *, pacer: Pacer | None = None
    ) -> None:
        self._exchange = exchange
        self._stream = stream
        self._settings = settings
        self._patience_s = settings.max_hold_s
        self._pacer = pacer
        self.paced = pacer is not None
        self._loop = asyncio.get_running_loop()
        self._backlog = Backlog(write_bytes=_WRITE_BYTES)
        self._queued_last = 0  # bytes of the last put that had to wait
        self._writer: asyncio.Task[None] | None = None
        self._fault: Exception | None = None
        self._last_put = (0, 0)  # tokens, and those to be read
        self._readable = 0  # handed over
        self._written_at = time.monotonic()
        self._ended = False
        self._in_event = False  # a part of an event has been handed over, the rest of it not
        self._offered_at: float | None = None  # when the write began that the connection has not taken yet
        self._paused_at: float | None = None  # when text was first withheld from a reader who has paused
        self._end_of_pace: asyncio.TimerHandle | None = None

    @cached_property
    def _changed(self) -> _Signal:
        """The writer got on, or came to wait."""
        return _Signal(self._loop)

    @cached_property
    def _wake(self) -> _Signal:
        """Something is new for the writer that waits for a reader."""
        return _Signal(self._loop)

    async def __aenter__(self) -> Delivery:
        if self._pacer is not None:
            self._stream.on_reader_change = self._wake.set
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._backlog:
            self._backlog = Backlog(write_bytes=_WRITE_BYTES)
        self._stream.held_bytes = 0
        if self._end_of_pace is not None:
            self._end_of_pace.cancel()
        if self._stream.connection is not None:  # not before: what waits is to wait here until the end
            self._stream.connection.end(self._stream.reader, now=time.monotonic())
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait((self._writer,))

    @property
    def full(self) -> bool:
        """The stream has its share of memory waiting: `room` comes before the next `put`."""
        return self._stream.held_bytes >= self._settings.max_buffered_bytes

    @property
    def empty(self) -> bool:
        """The client has been handed all there is."""
        return self._writer is None and not self._backlog and self._fault is None

    def takes_now(self, data: bytes) -> bool:
        """Whether `put` would hand this over at once, in one write."""
        plain = self._writer is None and self._pacer is None and 0 < len(data) <= _WRITE_BYTES
        return plain and self._exchange.writable

    @property
    def transport(self) -> WriteTransport | None:
        """Where framed chunks may go by `put`, each while nothing is left there; see `passed`.

        None while something waits here, and where answers are not framed.
        """
        return self._exchange.transport if self.empty and self._pacer is None else None

    def passed(
        self, sizes: Sequence[int], tokens: int, readable: Sequence[int], times: Sequence[float]
    ) -> None:
        """Chunks of so many bytes have gone by at these times.

        The client has so many `readable` tokens with each, and `tokens` in all.
        """
        self._last_put = (tokens, readable[-1])
        self._written_at = times[-1]
        self._client_has(tokens, readable, times)
        if self._stream.connection is not None:
            self._stream.connection.wrote(sizes, tokens, readable)

    def put(self, data: bytes, tokens: int, readable: int, *, last: bool = False) -> None:
        """Take the next `Piece`. `last`: the answer may end with it; `finish` is still to come."""
        if self._fault is not None:
            raise self._fault
        self._last_put = (tokens, readable)
        if self.takes_now(data):
            if last and self._exchange.finish_now(data):
                self._ended = True
            else:
                self._exchange.write_now(data)
            self._in_event = False
            self._handed_over(len(data), tokens, readable)
            return
        if self._writer is None and self._is_due(self._readable, readable):
            whole = len(data)
            data = self._write_at_once(Piece(data, tokens, readable))
            self._in_event = 0 < len(data) < whole
            if not data:
                return
        self._queued_last = len(data)
        self._stream.held_bytes += len(data)
        self._backlog.add(Piece(data, tokens, readable), join=self._pacer is None)
        if self._writer is None:
            self._writer = self._loop.create_task(self._write_backlog())

    async def room(self) -> None:
        """Wait while `full`. Raises `ClientTooSlow` at once or after a while, as the settings say.

        A paced stream that is full has an engine ahead of its reader, which is as it should be: it waits.
        """
        begun = self._loop.time()
        aborts = self._settings.at_cap == "abort" and self._pacer is None
        while self.full:
            if aborts and self._stream.held_bytes > self._queued_last:
                raise ClientTooSlow(_too_slow(self._stream.held_bytes))
            await self._change(begun, _LARGE_EVENT_S if aborts else self._patience_s)

    async def drained(self) -> None:
        """Wait until the client has all there is. Raises `ClientTooSlow` if it takes nothing more.

        A reader's pace, however slow, is waited for; see the class for his pauses.
        """
        begun = self._loop.time()
        while self._writer is not None:
            await self._change(begun, self._patience_s)
        self._raise_fault()

    async def finish(self) -> None:
        """The same, and end the answer."""
        await self.drained()
        if self._ended:
            return
        if self._exchange.writable:
            await self._exchange.finish()
            return
        try:
            async with asyncio.timeout(self._patience_s):
                await self._exchange.finish()
        except TimeoutError:
            raise ClientTooSlow(_too_slow(self._stream.held_bytes)) from None

    async def last_words(self, data: bytes) -> None:
        """The stream has failed: `data` comes behind what waits, and is the end.

        The pace is kept for a minute at most, and a client that takes nothing is not waited for longer.
        """
        self._patience_s = min(self._patience_s, _LAST_PATIENCE_S)
        self._wake.set()
        self._end_of_pace = self._loop.call_later(_LAST_PATIENCE_S, self.hurry)
        self.put(data, *self._last_put)

    def hurry(self) -> None:
        """From now on only the client's connection is waited for."""
        self._pacer = None
        self._wake.set()

    # ---- keep-alives, which are no part of the answer ---------------------------------------------

    @property
    def silent_s(self) -> float:
        """Seconds since the client's connection was last handed something."""
        self._stream.settle()
        return time.monotonic() - self._written_at

    @property
    def between_events(self) -> bool:
        """Whether the connection would take something now, and the last event left as a whole."""
        return not self._in_event and self._offered_at is None and self._exchange.writable

    def interject(self, data: bytes) -> None:
        """Hand over what counts as no text; only while `between_events`."""
        self._stream.settle()
        self._exchange.write_now(data)
        self._written_at = time.monotonic()
        if self._stream.connection is not None:
            tokens, readable = self._has
            self._stream.connection.wrote((_framed_bytes(len(data)),), tokens, (readable,))

    # ---- inside ----------------------------------------------------------------------------------

    async def _change(self, begun: float, within_s: float) -> None:
        """Wait until the writer gets on, or comes to wait for the connection or for the reader.

        Raises `ClientTooSlow` if it is the connection, and it has taken nothing for `within_s`, counted from
        `begun` at the earliest.
        """
        self._raise_fault()
        self._changed.clear()
        deadline = None if self._offered_at is None else max(self._offered_at, begun) + within_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            raise ClientTooSlow(_too_slow(self._stream.held_bytes)) from None

    def _write_at_once(self, piece: Piece) -> bytes:
        """Hand over what the connection takes now; the rest of it."""
        if not piece.data:
            self._handed_over(*_counted(piece))
        at, size = 0, len(piece.data)
        while at < size and self._exchange.writable:
            part = piece if size <= _WRITE_BYTES else self._slice(piece, at)
            self._exchange.write_now(part.data)
            self._handed_over(*_counted(part))
            at += len(part.data)
        return piece.data[at:]

    def _slice(self, piece: Piece, at: int) -> Piece:
        """What goes out of a large piece in one write: the client has its tokens with the last one."""
        end = at + _WRITE_BYTES
        counts = self._has if end < len(piece.data) else piece[1:]
        return Piece(piece.data[at:end], *counts)

    async def _write_backlog(self) -> None:
        try:
            while self._backlog:
                if (wait_s := self._wait_s(self._readable, self._backlog.readable)) > 0:
                    await self._sleep(wait_s)
                    continue
                piece = self._backlog.take(has=self._has, due=self._is_due)
                self._in_event = self._backlog.cut
                self._offered_at = self._loop.time()
                self._changed.set()
                if piece.data:
                    await self._exchange.write(piece.data)
                    if self._exchange.lost:
                        raise ClientGone
                self._offered_at = None
                self._stream.held_bytes -= len(piece.data)
                self._handed_over(*_counted(piece))
                self._changed.set()
        except Exception as fault:  # noqa: BLE001 - raised in the request's task, by its next call
            self._fault = fault
        finally:
            self._writer = None
            self._changed.set()

    @property
    def _has(self) -> tuple[int, int]:
        """Tokens that the client has, and those of them that are to be read."""
        return self._stream.delivered, self._readable

    def _is_due(self, readable_before: int, readable: int) -> bool:
        return self._wait_s(readable_before, readable) <= 0

    def _wait_s(self, readable_before: int, readable: int) -> float:
        """Seconds until the text between these two counts is due."""
        if self._pacer is None or readable == readable_before:
            return 0.0
        now = time.monotonic()
        wait_s = self._pacer.wait_s(readable_before, self._stream.reader.estimate(now), now)
        if wait_s < math.inf:
            self._paused_at = None
            return wait_s
        if self._paused_at is None:
            self._paused_at = now
        return max(0.0, self._paused_at + self._patience_s - now)

    async def _sleep(self, seconds: float) -> None:
        self._wake.clear()
        timer = self._loop.call_later(min(seconds, _LOOK_AGAIN_S), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _handed_over(self, size: int, tokens: int, readable: int) -> None:
        """So many bytes have gone to the client's connection, which has so many tokens with them."""
        now = time.monotonic()
        self._client_has(tokens, (readable,), (now,))
        if size:
            self._written_at = now
            if self._stream.connection is not None:
                self._stream.connection.wrote((_framed_bytes(size),), tokens, (readable,))

    def _client_has(self, tokens: int, readable: Sequence[int], times: Sequence[float]) -> None:
        stream = self._stream
        if tokens and stream.first_token is None:
            stream.first_token = times[0]
        stream.delivered = tokens
        self._readable = readable[-1]
        stream.reader.delivered(readable, times)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault


def _framed_bytes(size: int) -> int:
    """Of an HTTP chunk with so many bytes in it."""
    return size + (size.bit_length() + 3) // 4 + 4


def _counted(piece: Piece) -> tuple[int, int, int]:
    return len(piece.data), piece.tokens, piece.readable


def _too_slow(held_bytes: int) -> str:
    return (
        f"the client does not read: {held_bytes} bytes of the answer wait for it. Keep reading while the "
        "stream runs, or raise the gateway's delivery.max_buffered_bytes or delivery.max_hold_s"
    )
