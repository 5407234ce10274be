"""What goes to the engine about readers: only what it would otherwise get wrong.

For each stream the feed keeps a copy of the buffer that the engine has (`VirtualBuffer`), and sends a
`Reading` when the estimate departs from it. Only what the link has taken goes into the copy, so that what was
dropped is sent again at the next look. Reports that came in are looked at within 20 ms; all streams four
times a second. Each look is also counted (`ReaderRegistry.look`).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count, islice

import msgspec

from tokenflow_engine.buffer import DEFAULT_RATE, VirtualBuffer
from tokenflow_engine.protocol import Consumption, Reading
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.readers.estimator import Estimate
from tokenflow_gateway.readers.registry import ReaderRegistry
from tokenflow_gateway.readers.rounds import AT_A_TIME, one_round
from tokenflow_gateway.relay.stream import Stream

__all__ = ["ReaderFeed", "departs"]

_BATCH_S = 0.02
_SWEEP_S = 0.25
_TOKENS_OFF = 1.0
_SECONDS_OFF = 0.05
_RATE_OFF = 0.05


def departs(copy: VirtualBuffer, reading: Reading, *, now: float) -> bool:
    """Whether the engine must hear of `reading`.

    It must if its own position would be off by more than a token and by more than 50 ms of reading, or its
    rate by a twentieth, or if it is wrong about a pause.
    """
    off = abs(copy.consumed_at(now) - reading.consumed)
    return (
        copy.paused != reading.paused
        or off > max(_TOKENS_OFF, _SECONDS_OFF * reading.rate)
        or abs(copy.rate - reading.rate) > _RATE_OFF * reading.rate
    )


class ReaderFeed:
    """Sends readings of open streams to their engines until cancelled.

    Times on the link are wall-clock, those of copies monotonic: a clock that is set must not stop them.
    """

    def __init__(
        self,
        streams: Iterable[Stream],
        readers: ReaderRegistry,
        send: Callable[[Engine, Consumption], bool],
    ) -> None:
        self._streams = streams
        self._readers = readers
        self._send = send
        self._changed: set[Stream] = set()
        self._untold: set[Stream] = set()
        self._numbers = count(1)
        self._wake = asyncio.Event()

    def changed(self, stream: Stream) -> None:
        """Something new is known of this stream's reader; never waits."""
        self._changed.add(stream)
        self._wake.set()

    def reset(self, streams: Iterable[Stream]) -> None:
        """The engine of these streams knows nothing of their readers (any more)."""
        now = time.monotonic()
        for stream in streams:
            stream.engine_copy = VirtualBuffer(rate=stream.reader.declared_rate or DEFAULT_RATE, now=now)
            if stream.end is None:
                self._untold.add(stream)
                self.changed(stream)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_changes())
            tasks.create_task(self._sweep())

    async def _follow_changes(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(_BATCH_S)
            self._wake.clear()
            for _ in range(0, len(self._changed), AT_A_TIME):
                self.flush()
                await asyncio.sleep(0)

    async def _sweep(self) -> None:
        while True:
            self._readers.expire(time.monotonic())
            self._untold.intersection_update(self._streams)
            async for streams in one_round(self._streams, within_s=_SWEEP_S):
                self._look_at(streams)

    def flush(self) -> None:
        """Send what departs among the next streams that changed."""
        changed = list(islice(self._changed, AT_A_TIME))
        self._changed.difference_update(changed)
        self._look_at(changed)

    def _look_at(self, streams: Iterable[Stream]) -> None:
        """Send what departs among these, one message an engine."""
        batches: defaultdict[Engine, list[tuple[Stream, Reading]]] = defaultdict(list)
        for stream in streams:
            if stream.end is None:
                self._look(stream, batches[stream.engine])
            else:
                self._untold.discard(stream)
        for engine, batch in batches.items():
            if batch and self._send(engine, Consumption(readings=[reading for _, reading in batch])):
                self._told(batch)

    def _look(self, stream: Stream, batch: list[tuple[Stream, Reading]]) -> None:
        stream.settle()
        track = stream.reader
        all_has_come = 0 < track.shape.tokens <= track.handed_over
        estimate = self._readers.look(track, waiting=all_has_come, now=time.monotonic())
        if stream.engine.linked:
            self._add(stream, estimate, batch)

    def _add(self, stream: Stream, estimate: Estimate, batch: list[tuple[Stream, Reading]]) -> None:
        now = time.monotonic()
        copy, reading = stream.engine_copy, self._reading(stream, estimate)
        copy.generate(stream.generated, now=now)
        if stream in self._untold or departs(copy, reading, now=now):
            batch.append((stream, reading))

    def _told(self, batch: list[tuple[Stream, Reading]]) -> None:
        now = time.monotonic()
        for stream, reading in batch:
            stream.engine_copy.report(msgspec.structs.replace(reading, at=now), now=now)
            self._untold.discard(stream)

    def _reading(self, stream: Stream, estimate: Estimate) -> Reading:
        return Reading(
            rid=stream.rid,
            at=time.time(),
            consumed=stream.reader.consumed_tokens(estimate),
            rate=estimate.rate,
            rate_low=estimate.rate_low,
            rate_high=estimate.rate_high,
            paused=estimate.state == "paused",
            seq=next(self._numbers),
        )
