"""One stream's text on its way to the client: handed over at once where it can be, else in a bounded queue.

The engine is read, parsed and counted by the request's own task, which calls `put`. A second task writes, but
only while something waits: for the client's connection to take more or, in a paced stream, for the reader to
need it. What has not been handed over lies here, where it is counted, and not in the kernel.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import TracebackType

from tokenflow_gateway.config import DeliverySettings
from tokenflow_gateway.relay.errors import ClientTooSlow
from tokenflow_gateway.relay.exchange import Exchange
from tokenflow_gateway.relay.meter import Piece
from tokenflow_gateway.relay.pacer import Pacer
from tokenflow_gateway.relay.stream import Stream

__all__ = ["Delivery"]

_WRITE_BYTES = 16 * 1024
"""What waits is handed over in writes of about this size."""
_LOOK_AGAIN_S = 0.25
"""A wait for the reader is looked at again after this long: pauses may end without a word."""


class Delivery:
    """Context manager around one stream's way to its client. Nothing is written after it is left.

    Order is kept, and a piece is never cut. With a `pacer`, text is handed over when the reader needs it;
    pieces without text wait only for those before them.
    """

    def __init__(
        self, exchange: Exchange, stream: Stream, settings: DeliverySettings, *, pacer: Pacer | None = None
    ) -> None:
        self._exchange = exchange
        self._stream = stream
        self._settings = settings
        self._pacer = pacer
        self.paced = pacer is not None
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Piece] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._fault: Exception | None = None
        self._readable = 0  # handed over
        self._moved = asyncio.Event()
        self._moved_at = 0.0  # when the queue last became shorter, or began
        self._wake = asyncio.Event()

    async def __aenter__(self) -> Delivery:
        if self._pacer is not None:
            self._stream.on_reader_change = self._wake.set
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.clear()
        self._stream.held_bytes = 0
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
        return self._writer is None and not self._queue

    async def put(self, data: bytes, tokens: int, readable: int) -> None:
        """Take the next `Piece`. Waits only under a server that does not say if a write would wait."""
        if self._fault is not None:
            raise self._fault
        due = self._pacer is None or self._wait_s(self._readable, readable) <= 0
        if due and self._writer is None and self._exchange.writable:
            if data:
                await self._exchange.write(data)
            self._handed_over(len(data), tokens, readable)
            return
        self._queue.append(Piece(data, tokens, readable))
        self._stream.held_bytes += len(data)
        if self._writer is None:
            self._moved_at = self._loop.time()
            self._writer = self._loop.create_task(self._write_queue())

    async def room(self) -> None:
        """Wait while `full`. Raises `ClientTooSlow` at once or after a while, as the settings say.

        A paced stream that is full has an engine ahead of its reader, which is as it should be: it waits.
        """
        while self.full:
            if self._settings.at_cap == "abort" and self._pacer is None:
                raise ClientTooSlow(_too_slow(self._stream.held_bytes))
            try:
                await self._progress()
            except ClientTooSlow:
                self._moved_at = self._loop.time()  # what is here still waits for the client to come back
                raise

    async def drained(self) -> None:
        """Wait until the client has all there is. Raises `ClientTooSlow` if it takes nothing more."""
        while self._writer is not None:
            await self._progress()
        self._raise_fault()

    def hurry(self) -> None:
        """From now on only the client's connection is waited for."""
        self._pacer = None
        self._wake.set()

    # ---- inside ----------------------------------------------------------------------------------

    async def _progress(self) -> None:
        """Wait until the queue is shorter. Raises `ClientTooSlow` if it has not been for `max_hold_s`."""
        self._raise_fault()
        self._moved.clear()
        try:
            async with asyncio.timeout_at(self._moved_at + self._settings.max_hold_s):
                await self._moved.wait()
        except TimeoutError:
            raise ClientTooSlow(_too_slow(self._stream.held_bytes)) from None

    async def _write_queue(self) -> None:
        try:
            while self._queue:
                if (wait_s := self._wait_s(self._readable, self._queue[0].readable)) > 0:
                    await self._sleep(wait_s)
                    continue
                piece = self._take()
                if piece.data:
                    await self._exchange.write(piece.data)
                self._stream.held_bytes -= len(piece.data)
                self._handed_over(len(piece.data), piece.tokens, piece.readable)
                self._moved_at = self._loop.time()
                self._moved.set()
        except Exception as fault:  # noqa: BLE001 - raised in the request's task, by its next call
            self._fault = fault
        finally:
            self._writer = None
            self._moved.set()

    def _take(self) -> Piece:
        """The next piece and those that are due with it, as one."""
        last = self._queue.popleft()
        parts, size = [last.data], len(last.data)
        while self._queue and size < _WRITE_BYTES:
            if self._wait_s(last.readable, self._queue[0].readable) > 0:
                break
            last = self._queue.popleft()
            parts.append(last.data)
            size += len(last.data)
        return Piece(b"".join(parts), last.tokens, last.readable)

    def _wait_s(self, readable_before: int, readable: int) -> float:
        """Seconds until the text between these two counts is due."""
        if self._pacer is None or readable == readable_before:
            return 0.0
        now = time.monotonic()
        return self._pacer.wait_s(readable_before, self._stream.reader.estimate(now), now)

    async def _sleep(self, seconds: float) -> None:
        self._wake.clear()
        timer = self._loop.call_later(min(seconds, _LOOK_AGAIN_S), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _handed_over(self, size: int, tokens: int, readable: int) -> None:
        """`size` bytes have gone to the client's connection, which has these tokens with them."""
        now = time.monotonic()
        stream = self._stream
        if tokens and stream.first_token is None:
            stream.first_token = now
        stream.delivered = tokens
        self._readable = readable
        stream.reader.delivered(readable, now)
        if stream.connection is not None:
            stream.connection.wrote(size, readable)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault


def _too_slow(held_bytes: int) -> str:
    return (
        f"the client does not read: {held_bytes} bytes of the answer wait for it. Keep reading while the "
        "stream runs, or raise the gateway's delivery.max_buffered_bytes or delivery.max_hold_s"
    )
