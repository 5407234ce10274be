"""Device and host memory, and the moves of streams between them: the executor of plans."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tokenflow_bench.costs import Machine
from tokenflow_bench.simulator.copies import Copies
from tokenflow_bench.simulator.streams import DONE, Rows, Streams
from tokenflow_engine.policy.base import Phase, Place, Plan
from tokenflow_engine.policy.due import gives_way
from tokenflow_engine.policy.rows import paged

__all__ = ["Device", "Event", "Events", "Step"]

_RUNNING, _PARKED = int(Phase.RUNNING), int(Phase.PARKED)
_HERE = np.zeros(DONE + 1, dtype=bool)
_HERE[[_RUNNING, _PARKED]] = True
"""By phase: whether KV on the device is there to be copied."""


class Event(IntEnum):
    """What can happen outside a pass."""

    ARRIVED = 0
    EVICTED = 1
    LOADED = 2


class Events:
    """Times of what will happen; equal times in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event, int, int]] = []
        self._count = 0

    def add(self, at: float, event: Event, row: int, tokens: int = 0) -> None:
        """`event` happens to `row` at `at`."""
        heapq.heappush(self._heap, (at, self._count, event, row, tokens))
        self._count += 1

    def next_at(self) -> float:
        """When the next one happens."""
        return self._heap[0][0] if self._heap else float("inf")

    def pop(self) -> tuple[Event, int, int]:
        """The next one: event, row, tokens."""
        _, _, event, row, tokens = heapq.heappop(self._heap)
        return event, row, tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One more token for each of `rows`."""

    rows: Rows
    context: int
    """Tokens of all of them, before."""
    more: Rows
    """Free tokens that each takes, whole pages."""
    tokens: int
    """And all of them together."""


class Device:
    """Pages, copies, the host's pool. `granted`: waiting rows that the plan lets in, in its order."""

    def __init__(self, machine: Machine, streams: Streams, events: Events, *, overlap: bool = True) -> None:
        self.machine = machine
        self.streams = streams
        self.events = events
        self.copies = Copies(machine, overlap=overlap)
        self.free = machine.kv_tokens // machine.page_tokens * machine.page_tokens
        self.freeing = 0
        self.granted: list[int] = []
        self.retractions = 0
        self._copying_until = np.zeros(len(streams.phase))
        self._due_s: dict[int, float] = {}
        self._wanted: set[int] = set()
        self._on_host = 0

    @property
    def host_free(self) -> int:
        """Tokens that the host's pool can take."""
        return self.machine.host_tokens - self._on_host

    def apply(self, plan: Plan, live: Rows, *, now: float) -> None:
        """Do what the plan says. Its rows are positions in `live`."""
        rows = live.tolist()
        self._due_s = {rows[row]: seconds for row, seconds in plan.due_s.items()}
        self._wanted = {rows[row] for row, _ in plan.load}
        for row in plan.park:
            self._leave_batch(rows[row], Phase.PARKED, now=now)
        for row in plan.evict:
            self.evict(rows[row], now=now)
        for row in plan.resume:
            self.streams.move(rows[row], Phase.RUNNING, now=now)
        self.granted = []
        for row, place in plan.load:
            if place is Place.RECOMPUTE:
                self._drop(rows[row], now=now)
                self.granted.append(rows[row])
            else:
                self._load(rows[row], now=now)
        self.granted += [rows[row] for row in plan.admit]

    def evict(self, row: int, *, now: float) -> None:
        """Free the row's pages: at once what the host has, or all if that is full; else when copied.

        In a full host, copies of what is on the device make room first, then those of rows due back later.
        """
        streams = self.streams
        context = streams.work.prompt.item(row) + streams.generated.item(row)
        dirty = context - int(streams.synced[row])
        if dirty > self.host_free:
            self._make_room(row, dirty, now=now)
        if dirty > self.host_free:
            self.retract(row, now=now)
            return
        self._leave_batch(row, Phase.OFFLOADED, now=now)
        page = self.machine.page_tokens
        kept = int(streams.held[row]) - int(streams.synced[row]) // page * page if dirty else 0
        self.free += int(streams.held[row]) - kept
        streams.held[row] = kept
        self._sync(row, context)
        if kept:
            done = self.copies.evict(dirty, now=now)
            self._copying_until[row] = done
            self.freeing += kept
            self.events.add(done, Event.EVICTED, row, kept)

    def retract(self, row: int, *, now: float) -> None:
        """Drop the row's KV and queue it anew, as the engine does by itself."""
        self.retractions += 1
        self._leave_batch(row, Phase.OFFLOADED, now=now)
        self._release(row)
        self._drop(row, now=now)

    def evicted(self, row: int, tokens: int) -> None:
        """The rest of the row's pages has been copied."""
        self.free += tokens
        self.freeing -= tokens
        self.streams.held[row] -= tokens

    def grow(self, row: int, tokens: int) -> None:
        """Take pages so that the row's KV can be `tokens` long."""
        wanted = paged(tokens, self.machine.page_tokens)
        self.free -= wanted - int(self.streams.held[row])
        self.streams.held[row] = wanted
        assert self.free >= 0, "pages are taken only when there are some"

    def step(self, rows: Rows) -> Step:
        """What one more token for each of `rows` takes."""
        page = self.machine.page_tokens
        context = self.streams.context(rows)
        wanted = context + 1 if page == 1 else -(-(context + 1) // page) * page
        more = np.maximum(wanted - self.streams.held[rows], 0)
        return Step(rows, int(context.sum()), more, int(more.sum()))

    def take(self, step: Step) -> None:
        """Take the step's pages."""
        self.free -= step.tokens
        self.streams.held[step.rows] += step.more
        assert self.free >= 0, "pages are taken only when there are some"

    def finish(self, row: int, *, now: float) -> None:
        """All its tokens are generated: give back what it holds."""
        self._release(row)
        self.streams.move(row, DONE, now=now)

    def write_ahead(self, rows: Rows, *, now: float, until: float) -> None:
        """Copy dirty KV of `rows`, in this order, as far as the copy engine is idle in this time."""
        idle = min(self.copies.idle_tokens(now=now, until=until), self.host_free)
        if idle <= 0:
            return
        streams = self.streams
        rows = rows[_HERE[streams.phase[rows]]]
        synced = streams.synced[rows]
        dirty = streams.work.prompt[rows] + streams.generated[rows] - synced
        before = dirty.cumsum() - dirty
        tokens = np.minimum(np.maximum(idle - before, 0), dirty)
        streams.synced[rows] = synced + tokens
        written = int(tokens.sum())
        self._on_host += written
        self.copies.wrote(written)

    def check_integrity(self) -> None:
        """All pages are somewhere."""
        assert self._on_host == int(self.streams.synced.sum()), "the host holds what is synced"
        assert self.free + int(self.streams.held.sum()) == self.free_at_most, "pages are lost or doubled"

    @property
    def free_at_most(self) -> int:
        """Pages of an idle device, in tokens."""
        return self.machine.kv_tokens // self.machine.page_tokens * self.machine.page_tokens

    def _make_room(self, row: int, tokens: int, *, now: float) -> None:
        """Drop copies in the host until it can take so many tokens of `row`."""
        synced = self.streams.synced
        for other in np.concatenate([self.streams.rows(_RUNNING), self.streams.rows(_PARKED)]).tolist():
            if self.host_free >= tokens:
                return
            if other != row:
                self._sync(other, 0)
        later = [other for other in gives_way(self._due_s, row) if self._is_away(other, now=now)]
        if self.host_free + int(synced[later].sum()) < tokens:
            return
        for other in later:
            if self.host_free >= tokens:
                return
            self.retractions += 1
            self._drop(other, now=now)

    def _is_away(self, row: int, *, now: float) -> bool:
        """In the host alone, and not wanted back."""
        is_whole = self.streams.phase[row] == Phase.OFFLOADED and self._copying_until[row] <= now
        return is_whole and row not in self._wanted

    def _leave_batch(self, row: int, phase: Phase, *, now: float) -> None:
        self.streams.preemptions[row] += int(self.streams.phase[row] == Phase.RUNNING)
        self.streams.move(row, phase, now=now)

    def _load(self, row: int, *, now: float) -> None:
        context = int(self.streams.work.prompt[row] + self.streams.generated[row])
        start = max(now, float(self._copying_until[row]))
        if start > now:
            return  # still on its way out; the end of the copy is an event, and the policy plans anew
        self.grow(row, context)
        self.streams.move(row, Phase.LOADING, now=now)
        self.events.add(self.copies.load(context, now=start), Event.LOADED, row)

    def _sync(self, row: int, tokens: int) -> None:
        self._on_host += tokens - self.streams.synced.item(row)
        self.streams.synced[row] = tokens

    def _drop(self, row: int, *, now: float) -> None:
        self._sync(row, 0)
        self.streams.to_prefill[row] = self.streams.work.prompt[row] + self.streams.generated[row]
        self.streams.move(row, Phase.WAITING, now=now)

    def _release(self, row: int) -> None:
        self.free += int(self.streams.held[row])
        self.streams.held[row] = 0
        self._sync(row, 0)
