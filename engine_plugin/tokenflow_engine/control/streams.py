"""The book of streams: who opened which, what each has generated, what is closing, what must not start.

Pure: no I/O, no clock, no engine. One thread (the scheduler's) owns it. It answers two questions for the
plugin: what to tell which gateway, and which of the engine's requests to abort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenflow_engine.buffer import DEFAULT_RATE, VirtualBuffer
from tokenflow_engine.control.owners import Confirmation, Owner, Replaced, Update
from tokenflow_engine.control.rids import Lineage, lineage
from tokenflow_engine.control.tombstones import Tombstones
from tokenflow_engine.protocol import Aborted, Reading, State, StreamOpened

__all__ = ["ReaderView", "StreamBook"]

_KEEP_FINISHED_S = 60.0
_TTFT_S = 1.0
_MAX_FINISHED = 8192


class ReaderView(NamedTuple):
    """Who reads one request's tokens, as a policy asks it."""

    buffered: float
    """Tokens generated and not read."""
    rate: float
    rate_low: float
    rate_high: float
    paused: bool
    machine: bool
    weight: float
    ttft_s: float
    lead_cap_s: float
    """Infinite for no cap."""
    may_park: bool


_MACHINE = ReaderView(
    0.0, DEFAULT_RATE, DEFAULT_RATE, DEFAULT_RATE, False, True, 1.0, _TTFT_S, math.inf, True
)
"""Nobody is known to read a request that no gateway has opened: it takes what it gets."""


@dataclass(slots=True)
class _Part:
    """One request of the engine."""

    stream: _Stream
    counts_as_part: bool
    generated: int = 0
    state: State = "waiting"
    offloaded: bool = False


@dataclass(slots=True)
class _Stream:
    rid: str
    owner: Owner | None = None
    declared_rate: float | None = None
    buffer: VirtualBuffer | None = None
    """The reader's, for a stream that a gateway opened; told of `generated` when it is asked."""
    rates: tuple[float, float] | None = None
    """Lower and upper estimate of its rate, where a report gave them."""
    opening: StreamOpened | None = None
    total: int = 1
    """How many requests the stream has, once one of them has arrived."""
    live: dict[str, _Part] = field(default_factory=dict)
    ended: int = 0
    ended_tokens: int = 0
    any_aborted: bool = False
    closing: bool = False
    was_live: bool = False
    over_at: float | None = None

    @property
    def generated(self) -> int:
        return self.ended_tokens + sum(part.generated for part in self.live.values())

    def buffered(self, now: float) -> float | None:
        """Tokens not read yet, where the reader is known."""
        if self.buffer is None:
            return None
        self.buffer.generate(self.generated, now=now)
        return self.buffer.buffered_at(now)

    def idle_parts(self) -> Iterator[str]:
        """Its requests that wait or are parked, unless another one of them runs."""
        if self.state != "running":
            yield from self.live

    @property
    def is_offloaded(self) -> bool:
        """The KV of one of its requests is off the device, and none of them runs."""
        return self.state != "running" and any(part.offloaded for part in self.live.values())

    @property
    def is_over(self) -> bool:
        """All of its requests came and went."""
        return not self.live and self.ended >= self.total

    @property
    def state(self) -> State:
        states = {part.state for part in self.live.values()}
        if "running" in states:
            return "running"
        if "parked" in states:
            return "parked"
        if not self.is_over:
            return "waiting"
        return "aborted" if self.any_aborted else "finished"


class StreamBook:
    """See the module. Times are seconds of one monotonic clock, given by the caller.

    `generated_total` counts the tokens of every request, opened by a gateway or not; `started_total` the
    requests that have got their first.
    """

    def __init__(self) -> None:
        self.generated_total = 0
        self.started_total = 0
        self._streams: dict[str, _Stream] = {}
        self._parts: dict[str, _Part] = {}
        self._closing: dict[str, _Stream] = {}
        self._over: dict[str, _Stream] = {}
        self._changed: dict[str, _Stream] = {}
        self._confirmations: list[Confirmation] = []
        self._tombstones = Tombstones()
        self._changed_readers: dict[str, None] = {}
        self.has_urgent_updates = False
        """Whether a state (not just a count) changed since `take_updates`."""

    # ---- what gateways say ------------------------------------------------------------------------

    def opened(
        self,
        rid: str,
        *,
        owner: Owner,
        now: float,
        declared_rate: float | None = None,
        opening: StreamOpened | None = None,
    ) -> bool:
        """A gateway owns `rid`. It learns the state soon if the engine knows the stream already.

        `opening` is the whole message; without it only the rate is known. True if the engine has some of it.
        """
        self._tombstones.lift(rid)
        stream = self._streams.get(rid)
        if stream is None:
            stream = self._streams[rid] = _Stream(rid)
            self._over[rid] = stream  # nothing of it has arrived: forgotten if nothing ever does
            stream.over_at = now
        stream.owner, stream.declared_rate = owner, declared_rate
        stream.opening = opening or StreamOpened(rid=rid, at=0.0, declared_rate=declared_rate)
        if stream.buffer is None:
            stream.buffer = VirtualBuffer(rate=declared_rate or DEFAULT_RATE, now=now)
        self._reader_changed(stream)
        if stream.live or stream.ended:
            self._tell(stream, urgent=not stream.live)
        return bool(stream.live)

    def consumed(self, reading: Reading, *, owner: Owner, now: float) -> None:
        """Where a reader is; `reading.at` in the caller's clock. Not for streams of another gateway."""
        stream = self._streams.get(reading.rid)
        if stream is None or stream.buffer is None or stream.owner != owner:
            return
        stream.buffer.generate(stream.generated, now=now)
        if stream.buffer.report(reading, now=now):
            stream.rates = (reading.rate_low, reading.rate_high)
            self._reader_changed(stream)

    def lost(self, owner: Owner, *, now: float) -> None:
        """Nobody reports on this gateway's readers any more: all read on at the rate they declared."""
        for stream in self._streams.values():
            if stream.owner == owner and stream.buffer is not None:
                stream.buffer.forget_reader(rate=stream.declared_rate or DEFAULT_RATE, now=now)
                stream.rates = None
                self._reader_changed(stream)

    def closed(self, rid: str, *, owner: Owner, now: float) -> list[str]:
        """The requests to abort for a stream its gateway is done with; `take_confirmations` tells the end."""
        stream = self._streams.get(rid) or _Stream(rid)
        stream.owner = owner
        if not stream.is_over:
            self._tombstones.place(rid, owner=owner, now=now)
        stream.closing = True
        stream.was_live = bool(stream.live)
        self._closing[rid] = self._streams[rid] = stream
        return list(stream.live)

    def replaced(self, gateway: Replaced, *, now: float) -> list[str]:
        """The requests to abort because the processes that opened them are gone."""
        orphans = {s.rid: s.owner for s in self._streams.values() if _is_orphan(s, gateway)}
        return [
            part
            for rid, owner in orphans.items()
            if owner is not None
            for part in self.closed(rid, owner=owner, now=now)
        ]

    def classes(self, rids: Iterable[str]) -> dict[str, int]:
        """How many of these requests are of which class, of those that a gateway has opened."""
        counts: dict[str, int] = {}
        for rid in rids:
            part = self._parts.get(rid)
            if part is not None and part.stream.owner is not None and part.stream.opening is not None:
                name = part.stream.opening.sla
                counts[name] = counts.get(name, 0) + 1
        return counts

    # ---- what the engine does ---------------------------------------------------------------------

    def arrived(self, rid: str, *, is_warm_up: bool = False, now: float) -> bool:
        """A request has reached the scheduler. False: its stream was closed before, abort it.

        `is_warm_up`: generates nothing, only fills the prefix cache for the parallel samples to come.
        """
        origin = self._origin(rid)
        stream = self._expecting(origin)
        if rid not in self._parts:
            counts = not (is_warm_up and origin.is_sample)
            self._parts[rid] = stream.live[rid] = _Part(stream, counts)
            self._reader_changed(stream)
        self._tell(stream, urgent=False)  # most run a moment later, and then say so
        closer = self._tombstones.find(stream.rid, now=now)
        if closer is None:
            return True
        stream.owner, stream.closing, stream.was_live = closer, True, True
        self._closing[stream.rid] = stream
        return False

    def counted(self, rid: str, generated_tokens: int) -> None:
        """The request has generated so many tokens in all."""
        part = self._parts.get(rid)
        if part is None:
            return
        self.generated_total += generated_tokens - part.generated
        self.started_total += part.generated == 0 < generated_tokens
        became_running = part.state == "waiting"
        part.generated = generated_tokens
        if became_running:  # the last token of a stream that was parked comes after it was
            part.state = "running"
        self._tell(part.stream, urgent=became_running)

    def moved(self, rid: str, state: State, *, offloaded: bool = False) -> None:
        """The request waits, runs or is parked, and then its KV may be off the device."""
        part = self._parts.get(rid)
        if part is not None and (part.state, part.offloaded) != (state, offloaded):
            part.state, part.offloaded = state, offloaded
            self._tell(part.stream, urgent=True)

    def touched(self, rid: str) -> None:
        """Something about the request changed that its gateway may want to show."""
        part = self._parts.get(rid)
        if part is not None:
            self._tell(part.stream, urgent=False)

    def ended(self, rid: str, *, aborted: bool, now: float) -> None:
        """The request will generate nothing more."""
        part = self._parts.pop(rid, None)
        if part is None:
            return
        stream = part.stream
        del stream.live[rid]
        self._changed_readers.pop(rid, None)
        self._reader_changed(stream)
        stream.ended += part.counts_as_part
        stream.ended_tokens += part.generated
        stream.any_aborted |= aborted
        if not stream.live:  # forgotten in a minute, whether or not its other parts ever arrive
            stream.over_at = now
            self._over[stream.rid] = stream
        self._tell(stream, urgent=True)

    def reconcile(self, live: Collection[str], *, now: float) -> None:
        """End what the engine no longer holds; confirm closed streams of which nothing is left there."""
        for rid in [rid for rid in self._parts if rid not in live]:
            self.ended(rid, aborted=True, now=now)
        if not self._closing:
            return
        held = {self._origin(rid).stream for rid in live}
        for stream in [s for s in self._closing.values() if s.rid not in held]:
            self._confirm(stream)

    def forget_old(self, now: float) -> None:
        """Drop streams without requests for a minute, oldest first when there are too many."""
        while self._over:
            rid, stream = next(iter(self._over.items()))
            assert stream.over_at is not None
            if now - stream.over_at < _KEEP_FINISHED_S and len(self._over) <= _MAX_FINISHED:
                break
            del self._over[rid]
            if rid not in self._closing:
                self._streams.pop(rid, None)

    # ---- what to say and do -----------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        """Whether a gateway waits for a confirmation."""
        return bool(self._closing)

    def closing_parts(self) -> Iterator[str]:
        """Requests of closing streams that the engine may still hold."""
        for stream in self._closing.values():
            yield from stream.live

    def reader(self, rid: str, now: float) -> ReaderView:
        """Who reads this request. Several requests of one stream share its reader, and its buffer evenly."""
        part = self._parts.get(rid)
        stream = None if part is None else part.stream
        if stream is None or stream.buffer is None or stream.opening is None:
            return _MACHINE
        opening, rate, parts = stream.opening, stream.buffer.rate, max(1, len(stream.live))
        low, high = stream.rates or (rate, rate)
        return ReaderView(
            buffered=(stream.buffered(now) or 0.0) / parts,
            rate=rate / parts,
            rate_low=low / parts,
            rate_high=high / parts,
            paused=stream.buffer.paused,
            machine=opening.reader == "machine",
            weight=opening.weight,
            ttft_s=opening.ttft_s,
            lead_cap_s=math.inf if opening.lead_cap_s is None else opening.lead_cap_s,
            may_park=opening.may_park,
        )

    def take_changed_readers(self) -> Iterable[str]:
        """The requests whose reader has changed since the last call, other than by reading on."""
        if not self._changed_readers:
            return ()
        changed, self._changed_readers = self._changed_readers, {}
        return changed

    def take_updates(
        self, *, now: float, reason: Callable[[str], str | None] = lambda _rid: None
    ) -> list[Update]:
        """The streams that a gateway opened and that changed since the last call, as they are now.

        `reason` says of a request why it is where it is.
        """
        changed, self._changed, self.has_urgent_updates = self._changed, {}, False
        return [
            Update(
                s.owner,
                s.rid,
                s.state,
                s.generated,
                s.buffered(now),
                _first(map(reason, s.idle_parts())),
                s.is_offloaded,
            )
            for s in changed.values()
            if s.owner is not None
        ]

    def take_confirmations(self) -> list[Confirmation]:
        """Ends of closed streams since the last call; to be sent after the updates."""
        taken, self._confirmations = self._confirmations, []
        return taken

    def statistics(self) -> dict[str, int]:
        """Sizes of everything that could grow."""
        return {
            "streams": len(self._streams),
            "parts": len(self._parts),
            "closing": len(self._closing),
            "over": len(self._over),
            "tombstones": len(self._tombstones),
            "changed_readers": len(self._changed_readers),
        }

    def check_integrity(self) -> None:
        """Raise AssertionError if the book contradicts itself."""
        listed: Iterable[tuple[str, _Part]] = (
            item for stream in self._streams.values() for item in stream.live.items()
        )
        assert dict(listed) == self._parts
        assert all(self._streams.get(rid) is stream for rid, stream in self._closing.items())
        assert all(stream.over_at is not None for stream in self._over.values())

    def _expecting(self, origin: Lineage) -> _Stream:
        """The stream that a request belongs to, started afresh if all it had are over (its id is reused)."""
        stream = self._streams.get(origin.stream)
        if stream is None or (stream.is_over and not stream.closing):
            owner = None if stream is None else stream.owner
            stream = self._streams[origin.stream] = _Stream(origin.stream, owner)
        self._over.pop(stream.rid, None)
        stream.over_at = None
        stream.total = origin.total
        return stream

    def _origin(self, rid: str) -> Lineage:
        part = self._parts.get(rid)
        if part is not None:
            return Lineage(part.stream.rid, part.stream.total)
        stream = self._streams.get(rid)
        if stream is not None and stream.owner is not None:
            return Lineage(rid, 1)
        return lineage(rid)

    def _reader_changed(self, stream: _Stream) -> None:
        self._changed_readers.update(dict.fromkeys(stream.live))

    def _tell(self, stream: _Stream, *, urgent: bool) -> None:
        if stream.owner is None:
            return
        self._changed[stream.rid] = stream
        self.has_urgent_updates |= urgent

    def _confirm(self, stream: _Stream) -> None:
        assert stream.owner is not None
        assert not stream.live
        del self._closing[stream.rid]
        if stream.rid not in self._over:
            del self._streams[stream.rid]
        answer = Aborted(rid=stream.rid, generated=stream.generated, was_live=stream.was_live)
        self._confirmations.append(Confirmation(stream.owner, answer))
        stream.closing = False


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((why for why in reasons if why is not None), None)


def _is_orphan(stream: _Stream, gateway: Replaced) -> bool:
    owner = stream.owner
    return (
        not stream.is_over
        and owner is not None
        and owner.gateway_id == gateway.gateway_id
        and owner.incarnation in gateway.gone
    )
