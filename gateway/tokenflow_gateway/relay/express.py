"""Text on its way to the client within the read of the engine that brought it; no task is woken for it.

A chunk that fits the stream's shape (`chunk_shape`) goes by at once: it is written as it came, but for its
usage, and noted. What it says is counted in arrears, some chunks at a time: where little is in the caches,
each thing that is touched costs more than what is done with it. Whoever looks at what is counted has it
settled first (`Stream.settle`), which `link.feed` does four times a second.
"""

from __future__ import annotations

import time
from asyncio import WriteTransport
from typing import Any

from tokenflow_gateway.relay.chunk_shape import ChunkShape
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.dialects import Meter
from tokenflow_gateway.relay.engine_answer import EngineAnswer
from tokenflow_gateway.relay.errors import IdleTimeout
from tokenflow_gateway.relay.guard import RequestGuard
from tokenflow_gateway.relay.meter import StreamMeter
from tokenflow_gateway.relay.stream import Stream, nothing_to_settle

__all__ = ["Express", "note_usage"]

_MOST_NOTED = 32


class Express:
    """Context manager around one stream's way through the relay; at its end all is counted."""

    __slots__ = (
        "_delivery",
        "_guard",
        "_idle_s",
        "_meter",
        "_noted",
        "_response",
        "_shape",
        "_stream",
        "_transport",
    )

    def __init__(
        self,
        response: EngineAnswer,
        guard: RequestGuard,
        stream: Stream,
        delivery: Delivery,
        meter: Meter,
        *,
        idle_s: float,
    ) -> None:
        self._response = response
        self._guard = guard
        self._stream = stream
        self._delivery = delivery
        self._meter = meter
        self._idle_s = idle_s
        self._shape: ChunkShape | None = None  # what may go by now, and then over which transport
        self._transport: WriteTransport | None = None
        self._noted: list[Any] = []  # of each chunk: text, tokens so far, bytes, when it left

    def __enter__(self) -> Express:
        self._stream.settle = self._guard.settle = self._settle
        return self

    def __exit__(self, *_exc: object) -> None:
        self._shape = None
        self._settle()
        self._stream.settle = self._guard.settle = nothing_to_settle

    def take(self, data: bytes) -> bool:
        """Meter what has come, and give it to the client or to its queue.

        False if it was the end, or the queue is full. Raises what the meter and the delivery raise.
        """
        self._shape = None
        self._settle()
        meter, stream, delivery = self._meter, self._stream, self._delivery
        events = meter.events
        ready = meter.feed(data)
        stream.received = meter.tokens
        note_usage(stream, meter)
        delivery.put(ready, meter.tokens, meter.readable, last=meter.done and self._response.complete)
        if meter.events != events:
            self._guard.expect(self._idle_s, IdleTimeout)
        if meter.done or meter.aborted or (stream.held_bytes and delivery.full):
            return False
        self.go_on()
        return True

    def go_on(self) -> None:
        """Chunks may go by, if nothing waits and their shape is known; until `take` is called again."""
        if isinstance(self._meter, StreamMeter) and self._meter.between_events:
            self._shape, self._transport = self._meter.shape, self._delivery.transport

    def pass_by(self, read: bytes) -> bool:
        """Pass on a read of the engine's connection that is one HTTP chunk with one event that fits.

        False, with nothing done, for any other, and where something waits.
        """
        shape, transport = self._shape, self._transport
        if shape is None or transport is None:
            return False
        passed = shape.read(read)
        if passed is None or transport.get_write_buffer_size() or transport.is_closing():
            return False
        chunk, text, completion = passed
        transport.write(chunk)
        noted = self._noted
        noted += text, completion, len(chunk), time.monotonic()
        if len(noted) >= _MOST_NOTED * 4:
            self._settle()
        return True

    def _settle(self) -> None:
        """Count what has gone by."""
        noted = self._noted
        if not noted:
            return
        self._noted = []
        meter = self._meter
        assert isinstance(meter, StreamMeter)
        readable = meter.texts(noted[0::4], noted[1::4])
        self._stream.received = meter.tokens
        self._delivery.passed(noted[2::4], meter.tokens, readable, noted[3::4])
        self._guard.expect(self._idle_s, IdleTimeout, since=noted[-1])


def note_usage(stream: Stream, meter: Meter) -> None:
    """Take over what the engine has said of its own counts."""
    if meter.usage is not None and (meter.settled or stream.prompt_tokens is None):
        stream.prompt_tokens = meter.usage.prompt
        if meter.settled:
            stream.usage_tokens = meter.tokens
