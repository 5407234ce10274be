"""The record of each open stream, and the table of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from tokenflow_engine.buffer import VirtualBuffer
from tokenflow_engine.protocol import State, StreamState
from tokenflow_gateway.readers.connection import ConnectionTrack
from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.tenants.grants import NO_GRANT
from tokenflow_gateway.tenants.model import Grant

if TYPE_CHECKING:
    from tokenflow_gateway.engines.engine import Engine
    from tokenflow_gateway.relay.upstream import EngineRequest
    from tokenflow_gateway.telemetry.traces import AttemptTrace

__all__ = ["End", "Stream", "StreamTable", "nothing_to_settle"]

End = Literal[
    "finished",
    "refused",
    "client_gone",
    "engine_error",
    "engine_lost",
    "engine_timeout",
    "total_timeout",
    "retried",
    "truncated",
    "client_too_slow",
    "shutdown",
    "failed",
]
"""Why a stream ended.

``refused``: the engine answered with an error status, and runs nothing; ``engine_error``: an error inside the
stream; ``retried``: nothing of it was done, and another engine is asked under a `rid` of its own;
``client_too_slow``: the client did not read (`config.DeliverySettings`); ``failed``: our own fault.
"""


def nothing_to_settle() -> None:
    """All is counted."""


class Stream(msgspec.Struct, kw_only=True, eq=False):
    """One request from its arrival until the engine has confirmed that nothing of it is left.

    Text is counted in arrears (`express`): `settle()` comes before a look at its counts, its reader or its
    connection while it is open.
    """

    rid: str
    request_id: str
    route: str
    model: str
    engine: Engine
    reader: ReaderTrack
    engine_copy: VirtualBuffer
    """What the engine believes of the reader; see `link.feed`."""
    grant: Grant = NO_GRANT
    """Whose it is, and what was granted."""
    streaming: bool = True
    opened_at: float = msgspec.field(default_factory=time.time)
    """Wall-clock seconds; durations come from `started`."""
    started: float = msgspec.field(default_factory=time.monotonic)
    queued_s: float = 0.0
    """Of the time since then, what it has waited for a place on an engine."""
    first_token: float | None = None
    """`time.monotonic()` when the first content was handed to the client."""
    received: int = 0
    """Tokens that have come from the engine, by its usage or one per content event; see `StreamMeter`."""
    delivered: int = 0
    """Those of them that have been handed to the client's connection."""
    held_bytes: int = 0
    """Bytes for the client that wait in the gateway."""
    answered: bool = False
    """The engine has sent the whole answer, so there is nothing to abort."""
    abort: EngineRequest | None = None
    """What has an engine give it up that is no SGLang, where it goes on with it without a connection."""
    on_reader_change: Callable[[], None] | None = None
    """Called when something new is known of the reader, by whom the stream waits for it."""
    settle: Callable[[], None] = nothing_to_settle
    """Count what has gone by."""
    trace: AttemptTrace | None = None
    """Where telemetry is on."""
    connection: ConnectionTrack | None = None
    """What the client's connection shows of the reader, where it shows something."""
    counted: int | None = None
    """Tokens generated, as the engine's plugin counts them."""
    engine_state: State | None = None
    engine_reason: str | None = None
    """Why a policy has it wait or parked."""
    engine_offloaded: bool = False
    """Its KV is off the engine's device, or on its way back."""
    engine_buffered: float | None = None
    """Tokens not read yet, as the engine's plugin has it."""
    away_since: float | None = None
    """`time.monotonic()` since when the plugin has it out of the batch for others, after its start."""
    away_s: float = 0.0
    """Seconds for which it was so before."""
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    """`completion_tokens` of the engine's usage, once it came."""
    ended: float | None = None
    """`time.monotonic()` when it ended for the client."""
    end: End | None = None
    """How it ended for the client. The record stays until the engine confirms that nothing of it is left."""

    def note_state(self, state: StreamState, now: float) -> None:
        """Take over what the engine says of it; `now` is `time.monotonic()`."""
        if self.trace is not None and state.state != self.engine_state:
            self.trace.state(state.state, state.reason)
        self.engine_state = state.state
        self.counted = state.generated
        self.engine_buffered = state.buffered
        self.engine_reason = state.reason
        self.engine_offloaded = state.offloaded
        if state.state == "parked" or (state.offloaded and state.state == "waiting"):
            self.away_since = now if self.away_since is None else self.away_since
        elif self.away_since is not None:
            self.away_s += now - self.away_since
            self.away_since = None

    def parked_s(self, now: float) -> float:
        """Seconds out of the batch, its KV on the device or off it, until `now`."""
        return self.away_s + (0.0 if self.away_since is None else now - self.away_since)

    @property
    def tenant(self) -> str:
        return self.grant.tenant

    @property
    def engine_is_done(self) -> bool:
        """The engine has said its last word on this request, so there is nothing to abort."""
        return self.answered or self.end in {"finished", "refused"}

    @property
    def state(self) -> str:
        """What the stream is doing, for views."""
        if self.end is not None:
            return "closing"
        return self.engine_state or "unknown"

    @property
    def generated(self) -> int:
        """The best count of generated tokens there is."""
        most = self.received
        if self.counted is not None and self.counted > most:
            most = self.counted
        if self.usage_tokens is not None and self.usage_tokens > most:
            most = self.usage_tokens
        return most

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first content handed to the client."""
        return None if self.first_token is None else self.first_token - self.started

    @property
    def connection_kind(self) -> Literal["direct", "proxied", "unseen"]:
        """Whose connection the gateway looks at: the client's, a proxy's, or none."""
        if self.connection is None:
            return "unseen"
        return "proxied" if self.connection.proxied else "direct"

    def view(self, now: float) -> dict[str, object]:
        """The stream as ``/admin/streams`` shows it; `now` is `time.monotonic()`."""
        self.settle()
        reader = self.reader.estimate(now)
        consumed = min(self.reader.consumed_tokens(reader), self.generated)
        return {
            "id": self.rid,
            "request_id": self.request_id,
            "route": self.route,
            "tenant": self.tenant,
            "sla": self.grant.sla.name,
            "model": self.model,
            "engine": self.engine.name,
            "state": self.state,
            "reason": self.engine_reason,
            "offloaded": self.engine_offloaded,
            "generated": self.generated,
            "delivered": self.delivered,
            "held_bytes": self.held_bytes,
            "consumed": round(consumed, 1),
            "buffered": round(self.generated - consumed, 1),
            "engine_buffered": self.engine_buffered and round(self.engine_buffered, 1),
            "rate": round(reader.rate, 2),
            "rate_low": round(reader.rate_low, 2),
            "rate_high": round(reader.rate_high, 2),
            "reader": self.reader.reader,
            "reader_state": reader.state,
            "source": reader.source,
            "connection": self.connection_kind,
            "unread_at_least": None if self.connection is None else round(self.connection.unread_at_least, 1),
            "age_s": round(now - self.started, 3),
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 4),
        }


class StreamTable:
    """All streams that are open or closing, by `rid`."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._delivering: set[Stream] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def add(self, stream: Stream) -> None:
        assert stream.rid not in self._streams
        self._streams[stream.rid] = stream
        engine = stream.engine
        engine.streams.add(stream.rid)
        if not engine.linked:
            engine.load.opened()

    def get(self, rid: str) -> Stream | None:
        return self._streams.get(rid)

    def remove(self, rid: str) -> Stream | None:
        """Forget a stream. Harmless if it is gone already."""
        stream = self._streams.pop(rid, None)
        if stream is not None:
            stream.engine.streams.discard(rid)
            stream.engine.answered.discard(rid)
        return stream

    def delivers(self, stream: Stream) -> None:
        """From now on something of this stream may wait for its client, open or not."""
        self._delivering.add(stream)

    def delivered(self, stream: Stream) -> None:
        """Not any more."""
        self._delivering.discard(stream)

    @property
    def held_bytes(self) -> int:
        """Bytes that wait for clients, those of streams that are closed included."""
        return sum(stream.held_bytes for stream in self._delivering)

    def apply(self, states: Iterable[StreamState]) -> None:
        """Take over what an engine says of its streams; unknown ones are ignored."""
        now = time.monotonic()
        for state in states:
            stream = self._streams.get(state.rid)
            if stream is not None:
                stream.note_state(state, now)

    def of_engine(self, engine: Engine) -> list[Stream]:
        """The streams placed on one engine."""
        return [self._streams[rid] for rid in engine.streams]
