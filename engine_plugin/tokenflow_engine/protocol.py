"""The contract between gateway and engine: every message that crosses the link.

Messages are msgspec structs in msgpack. A ZeroMQ frame (DEALER at the gateway, ROUTER at the engine) is one
message, or a list of up to `MOST_IN_A_FRAME`: what there is to say at one moment goes together, since to
wake zmq's thread costs more than messages do. The handshake's are alone in their frames, in all versions.
Unknown *fields* are ignored, so either side may be newer by a field; unknown *versions* are refused in the
handshake with a reason a person can act on.

The life of a link::

    gateway                                   engine
      Hello(version, gateway_id, secret) ──▶
                                         ◀──  Welcome | Refused(code, reason)
      StreamOpened, Consumption, StreamClosed, SetPolicy ──▶
                                         ◀──  StreamStates (on change), Aborted, EngineStats (5 a second)
      Ping (once a second)               ──▶

The engine's statistics are its heartbeat; `Ping` is the gateway's. A message from a peer the engine does
not know (the engine restarted) is answered with ``Refused(code="hello_required")``: the gateway says
hello again and repeats ``StreamOpened`` for its live streams. A lost link never ends a stream.

Times are wall-clock seconds since the epoch (``time.time()``), so that they mean the same on two machines.
Numbers of gateways that nothing can be like (a rate of 0, a weight below 0, what is not finite) are moved to
the nearest bound as a message is made or decoded: policies divide by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import force_setattr

__all__ = [
    "HEARTBEAT_S",
    "LINK_TIMEOUT_S",
    "MOST_IN_A_FRAME",
    "PROTOCOL_VERSION",
    "Aborted",
    "Consumption",
    "Durations",
    "EngineMessage",
    "EngineStats",
    "GatewayMessage",
    "Hello",
    "Ping",
    "ProtocolError",
    "Reading",
    "Refused",
    "SetPolicy",
    "StreamClosed",
    "StreamOpened",
    "StreamState",
    "StreamStates",
    "Welcome",
    "decode_engine_messages",
    "decode_gateway_messages",
    "encode",
]

PROTOCOL_VERSION = 2
MOST_IN_A_FRAME = 50
"""Messages."""
HEARTBEAT_S = 1.0
"""Seconds between two pings of a gateway."""
LINK_TIMEOUT_S = 3.0
"""Seconds without any message after which either side counts the link as lost."""

Reader = Literal["human", "voice", "machine"]
State = Literal["waiting", "running", "parked", "finished", "aborted"]

_RATES = (0.01, 10_000.0)
"""Tokens per second that a reader can be thought to read."""
_WEIGHTS = (0.001, 1000.0)
_TTFTS_S = (0.001, 3600.0)
_LEADS_S = (0.1, 86_400.0)
_TOKENS = (0.0, 1e9)
_TIMES_S = (0.0, 1e11)


class ProtocolError(ValueError):
    """Bytes that are no message of this protocol."""


def _within(value: float, bounds: tuple[float, float]) -> float:
    """The nearest value between the bounds; the lower one for NaN."""
    return min(bounds[1], max(bounds[0], value))


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all messages: immutable, keyword-only, tagged by class name."""


# ---- gateway to engine ---------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag=True):
    """First message of a gateway. `gateway_id` outlives restarts, `incarnation` does not.

    Several incarnations of one gateway may be connected side by side, as while an old process drains. The
    engine aborts what an incarnation has left running once that one has been silent for `LINK_TIMEOUT_S` and
    a newer one is known; the order of their first hellos decides which is newer.
    """

    version: int
    gateway_id: str
    incarnation: str
    secret: str


class Ping(_Message, frozen=True, tag=True):
    """The gateway is alive."""


class StreamOpened(_Message, frozen=True, tag=True):
    """A request with this `rid` is about to reach the engine, or is live there after a reconnect."""

    rid: str
    at: float
    tenant: str = "anonymous"
    sla: str = "default"
    reader: Reader = "human"
    declared_rate: float | None = None
    """Tokens per second, where the client declared any."""
    weight: float = 1.0
    """Of its class: who goes first when not everybody can be served."""
    ttft_s: float = 1.0
    """Seconds to the first token that are left of what its class promises."""
    may_park: bool = True
    """Whether its class allows it to be preempted."""
    lead_cap_s: float | None = None
    """Seconds of reading beyond which it makes way for others that wait, where its class has such a cap."""

    def __post_init__(self) -> None:
        if (
            self.declared_rate is None
            and self.lead_cap_s is None
            and _TIMES_S[0] <= self.at <= _TIMES_S[1]
            and _WEIGHTS[0] <= self.weight <= _WEIGHTS[1]
            and _TTFTS_S[0] <= self.ttft_s <= _TTFTS_S[1]
        ):
            return
        force_setattr(self, "at", _within(self.at, _TIMES_S))
        force_setattr(self, "weight", _within(self.weight, _WEIGHTS))
        force_setattr(self, "ttft_s", _within(self.ttft_s, _TTFTS_S))
        if self.lead_cap_s is not None:
            force_setattr(self, "lead_cap_s", _within(self.lead_cap_s, _LEADS_S))
        rate = self.declared_rate
        if rate is not None:
            force_setattr(self, "declared_rate", _within(rate, _RATES) if rate > 0 else None)


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one reader is: `consumed` tokens at time `at`, moving at `rate` tokens per second.

    `seq` grows with every reading of a gateway, whatever its clock does: a lower one has been overtaken. It
    is 0 from gateways that do not count, and `at` has to do.
    """

    rid: str
    at: float
    consumed: float
    rate: float
    rate_low: float
    rate_high: float
    paused: bool = False
    seq: int = 0

    def __post_init__(self) -> None:
        slowest, fastest = _RATES
        if (
            slowest <= self.rate_low <= self.rate <= self.rate_high <= fastest
            and _TOKENS[0] <= self.consumed <= _TOKENS[1]
            and _TIMES_S[0] <= self.at <= _TIMES_S[1]
        ):
            return
        rate = _within(self.rate, _RATES)
        force_setattr(self, "rate", rate)
        force_setattr(self, "rate_low", _within(self.rate_low, (slowest, rate)))
        force_setattr(self, "rate_high", _within(self.rate_high, (rate, fastest)))
        force_setattr(self, "consumed", _within(self.consumed, _TOKENS))
        force_setattr(self, "at", _within(self.at, _TIMES_S))


class Consumption(_Message, frozen=True, tag=True):
    """A batch of reader positions: only those that moved off what the engine would extrapolate."""

    readings: list[Reading]


class StreamClosed(_Message, frozen=True, tag=True):
    """The gateway is done with this stream. If the engine is not, it aborts the request and confirms."""

    rid: str
    reason: str


class SetPolicy(_Message, frozen=True, tag=True):
    """Schedule by another policy from now on; `EngineStats.policy` says which is in force."""

    policy: str


GatewayMessage = Hello | Ping | StreamOpened | Consumption | StreamClosed | SetPolicy

# ---- engine to gateway ---------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag=True):
    """The link is up. `capabilities` names what this engine's plugin can do (``"count"``, ``"abort"``...)."""

    version: int
    engine_id: str
    model: str
    engine: str
    """Name and version, for example ``sglang 0.5.23``."""
    capabilities: list[str]
    kv_tokens: int
    max_running: int
    policies: list[str] = []
    """Names that `SetPolicy` may give."""


class Refused(_Message, frozen=True, tag=True):
    """The engine does not talk to this gateway, and why."""

    code: Literal["bad_secret", "bad_version", "hello_required", "bad_message"]
    reason: str


class StreamState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stream as the engine sees it. `generated` counts output tokens exactly, hidden ones included."""

    rid: str
    state: State
    generated: int
    buffered: float | None = None
    """Tokens generated and not yet read, where the engine knows its reader."""
    reason: str | None = None
    """Why it is waiting or parked, in the words of `Reason`, where a policy decided that."""
    offloaded: bool = False
    """Its KV is in host memory, or on the way there or back."""


class StreamStates(_Message, frozen=True, tag=True):
    """Streams of this gateway whose state or count changed since the last such message."""

    at: float
    states: list[StreamState]


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """How long things took since the start: a count for each class of length, and the sum."""

    bounds_s: list[float]
    """Upper ends of the classes, rising. What is longer than all is in one more class."""
    counts: list[int]
    sum_s: float


class EngineStats(_Message, frozen=True, tag=True):
    """The engine as a whole. Sent five times a second, also while a long step runs (`at` is then old)."""

    at: float
    running: int
    waiting: int
    parked: int
    kv_used_tokens: int
    kv_tokens: int
    tokens_per_s: float
    generated_total: int
    hook_errors: int = 0
    """Errors of our own code that the plugin caught since the engine started."""
    policy: str = "fcfs"
    """In force now."""
    suspended: dict[str, int] = {}
    """1 for the policy that failed and will be tried again in a while; `policy` schedules until then."""
    offloaded: int = 0
    """Streams whose KV is in host memory, or on its way back. `parked` counts those whose KV is on the
    device.
    """
    preemptions: dict[str, int] = {}
    """Since the start, by kind: ``parked``, ``offloaded``, ``dropped``, ``memory``, ``thrashed``, and back
    again: ``resumed``, ``loaded``, ``recomputed``. ``fixed_<why>``: refused, because the request cannot be
    preempted.
    """
    away_s: float = 0.0
    """Seconds out of the batch, in all, of the streams that came back with their KV; `came_back` says how
    many.
    """
    came_back: int = 0
    return_s: dict[str, Durations] = {}
    """From the decision to bring a preempted stream back to its first pass, by its way: ``resumed`` (the KV
    was on the device), ``loaded``, ``recomputed``.
    """
    departures: dict[str, int] = {}
    """Started streams that left the batch since the start, by reason."""
    stalls: dict[str, int] = {}
    """Readers who ran dry while their stream was out of the batch, as far as the engine knows them, by the
    reason for which it was out; and the seconds that they waited.
    """
    stall_s: dict[str, float] = {}
    copy_wait_s: float = 0.0
    """The scheduler waited for copies; 0 while they may overlap with forward passes."""
    evicted_tokens: int = 0
    """KV of streams that had to leave the device, and what of it host memory held already when that was
    decided.
    """
    evicted_synced_tokens: int = 0
    synced_evictions: dict[str, int] = {}
    """Streams that host memory had when they were to leave the device, but for what the last passes had
    added: by the scheduling passes after that one until their memory was free, up to ``2``, or ``more``.
    """
    plan_s: float = 0.0
    """Seconds spent planning since the start, in `plans` plans."""
    plans: int = 0
    plan_times: Durations | None = None
    """Those seconds, plan by plan; CPU time."""
    plan_errors: int = 0
    written_bytes: int = 0
    """From device to host, and back, since the start."""
    loaded_bytes: int = 0
    write_bytes_per_s: float = 0.0
    """How fast the last copies of each direction were; 0 before the first."""
    load_bytes_per_s: float = 0.0
    host_tokens: int = 0
    """KV tokens that host memory has room for, and what is used of it."""
    host_used_tokens: int = 0
    host_refused: int = 0
    """1 where opening host memory for KV failed, or copies to it and back were not exact."""
    ranks_lost: int = 0
    """1 once tensor-parallel ranks have ceased to agree on copies: streams are recomputed from then on."""
    fixed: dict[str, int] = {}
    """1 for the reason, in words, for which nothing in this engine is ever preempted; empty where it is."""
    waiting_by: dict[str, int] = {}
    """Those of `waiting` that a gateway has opened, by their class."""
    started_total: int = 0
    """Requests that have got their first token since the start."""
    synced_share: float = 0.0
    """Of the KV of running and parked streams, the share that host memory holds too."""


class Aborted(_Message, frozen=True, tag=True):
    """Confirms a `StreamClosed`: no request with this `rid` is queued or running any more."""

    rid: str
    generated: int
    was_live: bool
    """False when there was nothing left to abort."""


EngineMessage = Welcome | Refused | StreamStates | EngineStats | Aborted

_encoder = msgspec.msgpack.Encoder()
_gateway_decoder = msgspec.msgpack.Decoder(GatewayMessage | list[GatewayMessage])
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage | list[EngineMessage])


def encode(messages: Sequence[GatewayMessage] | Sequence[EngineMessage]) -> bytes:
    """Messages as the bytes of one frame."""
    return _encoder.encode(messages[0] if len(messages) == 1 else messages)


def decode_gateway_messages(frame: bytes) -> list[GatewayMessage]:
    """What a gateway sent. Raises `ProtocolError` for anything that is no message of this protocol."""
    try:
        decoded = _gateway_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of a gateway: {error}") from error
    return decoded if isinstance(decoded, list) else [decoded]


def decode_engine_messages(frame: bytes) -> list[EngineMessage]:
    """What an engine sent. Raises `ProtocolError` for anything that is no message of this protocol."""
    try:
        decoded = _engine_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of an engine: {error}") from error
    return decoded if isinstance(decoded, list) else [decoded]
