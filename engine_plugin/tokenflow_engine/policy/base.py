"""What a policy sees and what it answers: an `EngineView` in, a `Plan` out.

Policies are pure: no I/O, no clock of their own, no torch. The same objects run inside SGLang, in the
simulator and in tests. A view is a set of columns, one row a stream; a plan names rows of that view. Tokens
are KV tokens of the engine, times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Costs", "EngineView", "Phase", "Place", "Plan", "Policy", "Reason"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Phase(IntEnum):
    """Where a stream is. Each is in exactly one place."""

    WAITING = 0
    """Not prefilled yet, or its KV was dropped: it needs a prefill of `prefill_tokens`."""
    PREFILLING = 1
    """Its prompt is being prefilled in chunks; not to be touched."""
    RUNNING = 2
    """In the decode batch."""
    PARKED = 3
    """Out of the batch, KV on the device (soft preemption): back at once."""
    OFFLOADED = 4
    """Out of the batch, KV in host memory (hard preemption): back by a load, or a prefill."""
    LOADING = 5
    """Its KV is on the way back to the device, its pages are taken; it runs when that is done."""


class Place(IntEnum):
    """How an offloaded stream comes back."""

    LOAD = 0
    RECOMPUTE = 1


class Reason(IntEnum):
    """Why a plan does with a stream what it does; shown in the dashboard and in traces."""

    NONE = 0
    URGENT = 1
    """It would run dry soonest."""
    ADMITTED = 2
    """There is room in all horizons."""
    NO_ROOM = 3
    """Memory or batch slots are taken by streams that need them more."""
    OVERLOAD = 4
    """Demand exceeds capacity: a class of more weight goes first."""
    AHEAD = 5
    """Its reader has enough unread text; somebody else needs the place."""
    LEAD_CAP = 6
    """Its lead has reached the cap, and somebody waits."""
    PAUSED = 7
    """Its reader has paused."""
    RESUMED = 8
    """Its reader is about to come back to it, or there is room again."""
    NO_READER = 9
    """A machine reads it: it takes the capacity that readers leave."""
    MEMORY = 10
    """The decode batch needs pages for its next tokens."""
    FIXED = 11
    """It cannot be preempted safely (speculation, grammar, beams, ...)."""
    STOCK = 12
    """The engine's own order."""
    HOST_FULL = 13
    """Its KV was given up, because host memory was full and others are due back sooner."""


class Costs(Protocol):
    """What work costs on this engine: seconds for tokens, measured as it runs or from a table (simulator)."""

    @property
    def turn_s(self) -> float:
        """What a decode step takes longer while streams take turns in memory: copies, plans."""
        ...

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """One decode step over `batch` streams with `context_tokens` in all."""
        ...

    def prefill_s(self, tokens: float) -> float:
        """A prefill of `tokens`."""
        ...

    def load_s(self, tokens: float) -> float:
        """From host to device, behind what is queued now; without host memory, what a prefill takes."""
        ...

    def evict_s(self, tokens: float) -> float:
        """From device to host, behind what is queued now."""
        ...


# Plain numbers: looking up a member of an enumeration costs as much as a small array operation.
_WAITING, _PREFILLING, _RUNNING, _PARKED, _LOADING = (
    int(phase) for phase in (Phase.WAITING, Phase.PREFILLING, Phase.RUNNING, Phase.PARKED, Phase.LOADING)
)


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """The engine at `now`. All columns have the same length; row order is arrival order.

    What several steps of a plan ask of all rows is computed once: nothing in a view changes.
    """

    now: float
    kv_tokens: int
    """Capacity of the device's pool."""
    kv_free: int
    """Free at once: unallocated, and cached prefixes that nobody uses."""
    kv_freeing: int = 0
    """Tokens of evicted streams whose copy to the host is still under way: free soon, not yet in `kv_free`.
    """
    max_running: int
    """Streams in one decode batch: running, loading and prefilling ones count."""
    max_resident: int
    """Streams that can have KV on the device (rows of the engine's request table): those, and parked ones."""
    page_tokens: int
    mixed: bool = False
    """One pass can prefill and decode; else a pass that prefills decodes nothing, and the two take turns."""
    host_free: int
    """Room in the host pool."""
    costs: Costs
    mean_output: float
    """Expected output tokens of a stream; see `lengths.expected_output`."""

    phase: NDArray[np.int8]
    arrived: Floats
    prefill: Ints
    """Tokens that a prefill still has to compute. WAITING: prompt, and generated if KV was dropped, less a
    cached prefix. PREFILLING: what is left, whose pages are not taken yet. Else 0."""
    context: Ints
    """Prompt and generated tokens so far: its KV when on the device. Bringing it there takes this much of
    `kv_free`."""
    owned: Ints
    """KV tokens on the device that would be freed if it left (a prefix shared with others is not among them).
    """
    synced: Ints
    """Of `owned`, tokens that host memory holds too: free to drop."""
    generated: Ints
    max_output: Ints
    """`max_new_tokens` of the request."""
    buffered: Floats
    """Generated tokens that its reader has not read, at `now`."""
    rate: Floats
    """Tokens a second of its reader, above 0; the estimate's middle and upper band follow."""
    rate_low: Floats
    rate_high: Floats
    paused: Bools
    machine: Bools
    """Nobody reads it at human speed: agents and tools take what they get."""
    weight: Floats
    """Of its SLA class, 1 by default."""
    ttft_target: Floats
    """Seconds."""
    lead_cap: Floats
    """Seconds of reading that its class lets it be ahead while others wait; infinite for no cap."""
    may_park: Bools
    """Its class allows it and the engine can do it safely."""
    since: Floats
    """When it last changed its place."""
    preemptions: Ints

    def __len__(self) -> int:
        return len(self.phase)

    @cached_property
    def running(self) -> Bools:
        """In the decode batch."""
        rows: Bools = self.phase == _RUNNING
        return rows

    @cached_property
    def in_batch(self) -> Bools:
        """Holds one of `max_running` places: running, or about to."""
        rows: Bools = self.running | (self.phase == _PREFILLING) | (self.phase == _LOADING)
        return rows

    @cached_property
    def outside(self) -> Bools:
        """Not in the batch and not on the way: waiting, parked or offloaded."""
        return ~self.in_batch

    @cached_property
    def parked(self) -> Bools:
        """Out of the batch, KV on the device."""
        rows: Bools = self.phase == _PARKED
        return rows

    @cached_property
    def preempted(self) -> Bools:
        """Parked or offloaded."""
        rows: Bools = self.outside & (self.phase != _WAITING)
        return rows

    @cached_property
    def started(self) -> Bools:
        """Its reader has had a first token."""
        rows: Bools = self.generated > 0
        return rows

    @cached_property
    def read(self) -> Bools:
        """Somebody reads it at human speed, and has not paused."""
        return ~(self.machine | self.paused)

    def part(self, rows: Ints) -> EngineView:
        """The same engine with these rows only."""
        return replace(self, **{name: getattr(self, name).take(rows) for name in _COLUMNS})


_NAMES = [field.name for field in fields(EngineView)]
_COLUMNS = _NAMES[_NAMES.index("phase") :]


@dataclass(slots=True, kw_only=True)
class Plan:
    """Rows of the view, in the order in which to act. A row is in at most one of the lists.

    A running stream in none of them goes on; a parked, offloaded or waiting one stays where it is.
    """

    stock: bool = False
    """Leave admission and retraction to the engine: its own queue order, its own reserve. The lists are
    empty."""
    next_prompt: int = 0
    """With `stock`: one newcomer with a prompt of at most so many tokens comes in before the next plan, which
    would change nothing for it and take time from its first token."""
    park: list[int] = field(default_factory=list)
    """RUNNING: out of the batch, KV stays."""
    evict: list[int] = field(default_factory=list)
    """RUNNING or PARKED: out, and its device KV is freed: what is synced at once, the rest when its copy is
    done. With the host pool full somebody's KV is dropped, by `due_s`: that stream is WAITING again, with a
    prefill of its whole context."""
    resume: list[int] = field(default_factory=list)
    """PARKED: back into the batch. Costs nothing."""
    load: list[tuple[int, Place]] = field(default_factory=list)
    """OFFLOADED: bring it back. RECOMPUTE drops its copy: it is then prefilled like an admitted one, before
    those."""
    admit: list[int] = field(default_factory=list)
    """WAITING: prefill these, in this order, as far as the pass allows; no other."""
    prefill_tokens: int | None = None
    """The longest prefill pass that the tightest running reader can bear; None: the engine's own limit."""
    write: list[int] = field(default_factory=list)
    """RUNNING or PARKED: whose KV to copy to the host first, likeliest victims first."""
    due_s: dict[int, float] = field(default_factory=dict)
    """With little room in the host pool: in how many seconds rows are due back, latest first (see `due`)."""
    reasons: dict[int, Reason] = field(default_factory=dict)
    """For every row in a list, and for others that it has something to say of."""
    why_waiting: Reason = Reason.NONE
    """For every WAITING row without a reason of its own."""
    next_at: float = float("inf")
    """Plan again by then even if nothing happens: the next time a slack or a horizon runs out."""

    def of_whole(self, rows: Ints) -> Plan:
        """The same plan, which was made for `part(rows)` of a view, for all of it."""
        return replace(
            self,
            park=[rows.item(row) for row in self.park],
            evict=[rows.item(row) for row in self.evict],
            resume=[rows.item(row) for row in self.resume],
            load=[(rows.item(row), place) for row, place in self.load],
            admit=[rows.item(row) for row in self.admit],
            write=[rows.item(row) for row in self.write],
            due_s={rows.item(row): seconds for row, seconds in self.due_s.items()},
            reasons={rows.item(row): why for row, why in self.reasons.items()},
        )


class Policy(Protocol):
    """Decides. May keep state of its own between plans (hysteresis), keyed by `EngineView` rows' `ids`."""

    name: str

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        """The plan for this view. `ids` names the rows over time. Equal histories give equal plans."""
        ...
