"""Device and host memory, and the moves of streams between them: the executor of plans."""

from __future__ import annotations

import heapq
from enum import IntEnum

import numpy as np

from tokenflow_bench.costs import Machine
from tokenflow_bench.simulator.copies import Copies
from tokenflow_bench.simulator.streams import DONE, Rows, Streams
from tokenflow_engine.policy.base import Phase, Place, Plan
from tokenflow_engine.policy.rows import paged

__all__ = ["Device", "Event", "Events"]

_RUNNING, _PARKED = int(Phase.RUNNING), int(Phase.PARKED)


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

    @property
    def host_free(self) -> int:
        """Tokens that the host's pool can take."""
        return self.machine.host_tokens - int(self.streams.synced.sum())

    def apply(self, plan: Plan, live: Rows, *, now: float) -> None:
        """Do what the plan says. Its rows are positions in `live`."""
        rows = live.tolist()
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
        """Free the row's pages: at once what the host has, or all if that is full; else when copied."""
        streams = self.streams
        context = int(streams.context(np.array([row]))[0])
        dirty = context - int(streams.synced[row])
        if dirty > self.host_free:
            self.retract(row, now=now)
            return
        self._leave_batch(row, Phase.OFFLOADED, now=now)
        page = self.machine.page_tokens
        kept = int(streams.held[row]) - int(streams.synced[row]) // page * page if dirty else 0
        self.free += int(streams.held[row]) - kept
        streams.held[row] = kept
        streams.synced[row] = context
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

    def growth(self, rows: Rows) -> int:
        """Free tokens that one more token for each of `rows` takes."""
        page = self.machine.page_tokens
        wanted = -(-(self.streams.context(rows) + 1) // page) * page
        return int(np.maximum(wanted - self.streams.held[rows], 0).sum())

    def grow_by_one(self, rows: Rows) -> None:
        """Take the pages for one more token for each of `rows`."""
        page = self.machine.page_tokens
        wanted = np.maximum(-(-(self.streams.context(rows) + 1) // page) * page, self.streams.held[rows])
        self.free -= int((wanted - self.streams.held[rows]).sum())
        self.streams.held[rows] = wanted
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
        phase = self.streams.phase[rows]
        rows = rows[(phase == _RUNNING) | (phase == _PARKED)]
        dirty = self.streams.context(rows) - self.streams.synced[rows]
        before = np.cumsum(dirty) - dirty
        tokens = np.clip(idle - before, 0, dirty)
        self.streams.synced[rows] += tokens
        self.copies.wrote(int(tokens.sum()))

    def check_integrity(self) -> None:
        """All pages are somewhere."""
        assert self.free + int(self.streams.held.sum()) == self.free_at_most, "pages are lost or doubled"

    @property
    def free_at_most(self) -> int:
        """Pages of an idle device, in tokens."""
        return self.machine.kv_tokens // self.machine.page_tokens * self.machine.page_tokens

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

    def _drop(self, row: int, *, now: float) -> None:
        self.streams.synced[row] = 0
        self.streams.to_prefill[row] = self.streams.work.prompt[row] + self.streams.generated[row]
        self.streams.move(row, Phase.WAITING, now=now)

    def _release(self, row: int) -> None:
        self.free += int(self.streams.held[row])
        self.streams.held[row] = 0
        self.streams.synced[row] = 0
