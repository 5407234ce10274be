"""Who goes first of those who wait: fair by weight between classes, their tenants, and the tenants' users.

Start-time fair queueing (Goyal, Vin and Cheng 1996) on each level, with the tokens of a request as its cost:
while several wait, each gets a share by its weight, and one that was idle gets no credit for it. Of a
user, or a tenant whose requests name none, the earliest deadline goes first. Pure: no clock, nothing waits.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = ["FairQueue", "Waiting"]

_LEAST_COST: Final = 1.0

_Path: TypeAlias = list[tuple[str, float]]
"""Flows from the top down, with the weight of each."""


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """One request that waits."""

    sla: str
    weight: float
    """Of its class, or what the request has raised it to."""
    tenant: str
    tenant_weight: float = 1.0
    user: str = ""
    """Of the tenant's, where it says so."""
    cost: float = _LEAST_COST
    """Tokens that it is expected to take."""
    deadline: float = 0.0
    """When its first token is due."""
    pool: Hashable = None
    """Which engines may take it: of two with the same, the later one fits nowhere that the earlier does not.
    """
    gone: bool = False

    @property
    def path(self) -> _Path:
        return [(self.sla, self.weight), (self.tenant, self.tenant_weight), (self.user, 1.0)]


@dataclass(slots=True)
class _Flow:
    """A class, a tenant of one, a user of a tenant: when it is next, in virtual time, if it has someone."""

    start: float = 0.0
    finish: float = 0.0
    busy: bool = False
    weight: float = 1.0


class _Level:
    """Flows that compete."""

    __slots__ = ("flows", "now")

    def __init__(self) -> None:
        self.flows: dict[str, _Flow] = {}
        self.now = 0.0

    def arrive(self, name: str, weight: float) -> None:
        """It has someone waiting now."""
        flow = self.flows.setdefault(name, _Flow())
        flow.weight = weight
        if not flow.busy:
            flow.start, flow.busy = max(self.now, flow.finish), True

    def serve(self, name: str, cost: float, *, more: bool) -> None:
        """One of it goes; `more` wait."""
        flow = self.flows[name]
        self.now = max(self.now, flow.start)
        flow.finish = flow.start + cost
        flow.start, flow.busy = flow.finish, more
        if not more:
            self._forget()

    def leave(self, name: str) -> None:
        """The last of it has left without being served."""
        self.flows[name].busy = False
        self._forget()

    def order(self) -> list[str]:
        """Those who have someone waiting, whose turn comes first before others; of two, the heavier one."""
        busy = [(flow.start, -flow.weight, name) for name, flow in self.flows.items() if flow.busy]
        return [name for *_, name in sorted(busy)]

    def _forget(self) -> None:
        """An idle flow whose last turn is in the past is as good as new."""
        for name, flow in list(self.flows.items()):
            if not flow.busy and flow.finish <= self.now:
                del self.flows[name]


class _Leaf:
    """Those of one user, by their pools, in the order of their deadlines."""

    __slots__ = ("_pools", "count")

    def __init__(self) -> None:
        self._pools: dict[Hashable, list[tuple[float, int, Waiting]]] = {}
        self.count = 0

    def push(self, waiting: Waiting, path: _Path, arrival: int) -> None:
        heapq.heappush(self._pools.setdefault(waiting.pool, []), (waiting.deadline, arrival, waiting))
        self.count += 1

    def take_out(self, waiting: Waiting, path: _Path, cost: float | None) -> None:
        waiting.gone = True
        self.count -= 1
        heap = self._pools[waiting.pool]
        while heap and heap[0][2].gone:
            heapq.heappop(heap)
        if not heap:
            del self._pools[waiting.pool]

    def candidates(self) -> Iterator[Waiting]:
        """The first for each pool of engines."""
        for _, _, waiting in sorted(heap[0] for heap in self._pools.values()):
            yield waiting


class _Branch:
    """Flows that compete, each with those of its own below it."""

    __slots__ = ("_keeps", "_level", "children", "count")

    def __init__(self, *, keeps: bool = False) -> None:
        """`keeps`: what is below a flow stays when nobody waits there, and remembers who had a turn."""
        self._keeps = keeps
        self._level = _Level()
        self.children: dict[str, _Branch | _Leaf] = {}
        self.count = 0

    def push(self, waiting: Waiting, path: _Path, arrival: int) -> None:
        (name, weight), *rest = path
        child = self.children.get(name)
        if child is None:
            child = self.children[name] = _Branch() if rest else _Leaf()
        child.push(waiting, rest, arrival)
        self.count += 1
        self._level.arrive(name, weight)

    def take_out(self, waiting: Waiting, path: _Path, cost: float | None) -> None:
        """`cost`: what it is served with; None if it has left."""
        (name, weight), *rest = path
        child = self.children[name]
        child.take_out(waiting, rest, cost)
        self.count -= 1
        if cost is not None:
            self._level.serve(name, cost / weight, more=child.count > 0)
        elif not child.count:
            self._level.leave(name)
        if not (child.count or self._keeps):
            del self.children[name]

    def pass_through(self, path: _Path, cost: float) -> None:
        """One that comes while nobody waits here, and is served."""
        (name, weight), *rest = path
        self._level.arrive(name, weight)
        self._level.serve(name, cost / weight, more=False)
        if self._keeps:
            child = self.children.setdefault(name, _Branch())
            assert isinstance(child, _Branch)
            child.pass_through(rest, cost)

    def candidates(self) -> Iterator[Waiting]:
        """In fair order."""
        for name in self._level.order():
            yield from self.children[name].candidates()


class FairQueue:
    """See the module. `push` what waits, `take` who is next of those that fit, `remove` who has left."""

    def __init__(self) -> None:
        self._root = _Branch(keeps=True)
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return self._root.count

    def counts(self) -> dict[str, int]:
        """How many wait, by class."""
        return {name: child.count for name, child in self._root.children.items()}

    def push(self, waiting: Waiting) -> None:
        self._root.push(waiting, waiting.path, next(self._arrivals))

    def at_once(self, waiting: Waiting, fits: Callable[[Waiting], bool]) -> bool:
        """`push` and `take` in one, of one that fits while nobody waits. False if that is not so."""
        if len(self) or not fits(waiting):
            return False
        waiting.gone = True
        self._root.pass_through(waiting.path, max(waiting.cost, _LEAST_COST))
        return True

    def remove(self, waiting: Waiting) -> None:
        """It has left without being served. Harmless if it is not here any more."""
        if not waiting.gone:
            self._root.take_out(waiting, waiting.path, None)

    def take(self, fits: Callable[[Waiting], bool]) -> Waiting | None:
        """The first, in fair order, of those that fit; it is in the queue no longer.

        `fits` is asked in that order, and of each pool only for the first that waits.
        """
        full: set[Hashable] = set()
        for waiting in self._root.candidates():
            if waiting.pool in full:
                continue
            if fits(waiting):
                self._root.take_out(waiting, waiting.path, max(waiting.cost, _LEAST_COST))
                return waiting
            full.add(waiting.pool)
        return None
