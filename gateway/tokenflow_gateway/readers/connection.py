"""One stream's connection as evidence of how far its reader is; and the sweep over all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from tokenflow_gateway.readers.ledger import ByteLedger
from tokenflow_gateway.readers.rounds import one_round
from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.readers.transport import SocketMeter
from tokenflow_gateway.readers.window import WindowWatch

if TYPE_CHECKING:
    from tokenflow_gateway.relay.stream import Stream

__all__ = ["ConnectionSweep", "ConnectionTrack"]

_SWEEP_S = 0.1
_SELDOM_S = 0.25
"""Between two looks at a client that keeps up and whose buffer is too large to tell its position."""
_OF_PROXIES = frozenset({b"via", b"forwarded", b"x-forwarded-for"})
"""Headers of a request that somebody in between has passed on."""


class ConnectionTrack:
    """Knows which bytes carried which tokens, and so turns what the kernel tells into positions.

    Of a proxy's connection (`proxied`) only bounds and pauses are taken: its position is nobody's.
    """

    __slots__ = (
        "_at_most",
        "_ledger",
        "_look_at",
        "_meter",
        "_settled_at",
        "_stalled",
        "_tokens",
        "_watch",
        "proxied",
    )

    def __init__(self, meter: SocketMeter, watch: WindowWatch, *, proxied: bool, now: float) -> None:
        self._meter = meter
        self._watch = watch
        self.proxied = proxied
        self._ledger = ByteLedger()
        self._tokens = 0
        self._at_most: float | None = None
        self._stalled = False
        self._settled_at = 0
        self._look_at = now

    @classmethod
    def begin(
        cls, meter: SocketMeter | None, headers: Iterable[tuple[bytes, bytes]] = (), *, now: float
    ) -> Self | None:
        """Before the first byte of an event stream; None where the connection shows nothing.

        `headers`: the request's, which tell of proxies that name themselves.
        """
        first = None if meter is None else meter.probe()
        if meter is None or first is None:
            return None
        meter.start()
        proxied = not _OF_PROXIES.isdisjoint([name for name, _ in headers])
        return cls(meter, WindowWatch(first, now=now), proxied=proxied, now=now)

    @property
    def unread_at_least(self) -> float:
        """Readable tokens handed over that the client's program had certainly not taken at the last look."""
        return 0.0 if self._at_most is None else max(0.0, self._ledger.tokens - self._at_most)

    def due(self, now: float) -> bool:
        """Whether to look again."""
        return now >= self._look_at

    def wrote(self, sizes: Sequence[int], tokens: int, readable: Sequence[int]) -> None:
        """Chunks of so many bytes have been handed to the server.

        The client has so many `readable` tokens with each, and `tokens` in all.
        """
        self._ledger.wrote(sizes, readable)
        self._tokens = tokens

    def look(self, reader: ReaderTrack, *, now: float) -> bool:
        """Read the connection and tell `reader`; whether it was news. Free while nothing is under way."""
        ledger = self._ledger
        if self._settled_at == ledger.bytes:
            return False
        reading = self._meter.probe()
        if reading is None:
            return False
        evidence = self._watch.look(reading, event_bytes=ledger.bytes / max(1, self._tokens), now=now)
        before = reading.written - ledger.bytes
        at_most = evidence.at_most
        self._at_most = None if at_most is None else ledger.tokens_within(at_most - before)
        moved = evidence.moved and not self.proxied
        position = ledger.tokens_within(evidence.read_as_shown - before) if moved else None
        reader.transport(at_most=self._at_most, position=position, stalled=evidence.stalled, now=now)
        ledger.forget(evidence.read_as_shown - before - self._watch.doubt_bytes)
        self._settled_at = ledger.bytes if evidence.settled else -1
        if not self._watch.small and evidence.at_most is None and not evidence.stalled:
            self._look_at = now + _SELDOM_S
        news = moved or evidence.stalled != self._stalled
        self._stalled = evidence.stalled
        return news

    def end(self, reader: ReaderTrack, *, now: float) -> None:
        """The answer is over."""
        self._meter.stop()
        self._at_most = None
        reader.transport_ended(now)


class ConnectionSweep:
    """Looks at the connections of all open streams ten times a second, until cancelled."""

    def __init__(self, streams: Iterable[Stream], on_news: Callable[[Stream], None]) -> None:
        self._streams = streams
        self._on_news = on_news

    async def run(self) -> None:
        while True:
            async for streams in one_round(self._streams, within_s=_SWEEP_S):
                self._look_at(streams)

    def _look_at(self, streams: Iterable[Stream]) -> None:
        for stream in streams:
            self._look(stream)

    def _look(self, stream: Stream) -> None:
        connection, now = stream.connection, time.monotonic()
        if stream.end is not None or connection is None or not connection.due(now):
            return
        stream.settle()
        if connection.look(stream.reader, now=now):
            self._on_news(stream)
