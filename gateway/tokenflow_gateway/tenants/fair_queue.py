"""Who goes first of those who wait: fair by weight between classes, their tenants, and the tenants' users.

Start-time fair queueing (Goyal, Vin and Cheng 1996) for classes and tenants, with the tokens of a request as
its cost: while several wait, each gets a share by its weight, and one that was idle gets no credit for it.
Users of a tenant take turns. Of a user, or a tenant whose requests name none, the earliest deadline goes
first. Pure: no clock, nothing waits.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

__all__ = ["FairQueue", "Waiting"]

_LEAST_COST: Final = 1.0
_MOST_OF_CLASS: Final = 16_384.0
"""What a class is charged for one request at most: a tenant's giants are to set back that tenant alone."""
_FEW: Final = 64
"""Idle flows that are not worth a look."""

_Path: TypeAlias = list[tuple[str, float, float]]
"""Flows from the top down, with the weight of each, and what it is charged."""


class Waiting(msgspec.Struct, kw_only=True, eq=False):
    """One request that waits."""

    sla: str
    weight: float
    """Of its class."""
    tenant: str
    tenant_weight: float = 1.0
    user: str = ""
    """Of the tenant's, where it says so."""
    cost: float = _LEAST_COST
    """Tokens that it is expected to take."""
    deadline: float = 0.0
    """When its first token is due: the order of those of one user."""
    pool: Hashable = None
    """Which engines may take it: of two with the same, the later one fits nowhere that the earlier does not.
    """
    gone: bool = False

    @property
    def path(self) -> _Path:
        cost = max(self.cost, _LEAST_COST)
        return [
            (self.sla, self.weight, min(cost, _MOST_OF_CLASS)),
            (self.tenant, self.tenant_weight, cost),
        ]


@dataclass(slots=True)
class _Flow:
    """A class, or a tenant of one: when it is next, in virtual time, if it has someone."""

    start: float = 0.0
    finish: float = 0.0
    weight: float = 1.0


class _Level:
    """Flows that compete."""

    __slots__ = ("_idle", "_most_idle", "_now", "busy")

    def __init__(self) -> None:
        self.busy: dict[str, _Flow] = {}
        """Those that have someone waiting."""
        self._idle: dict[str, _Flow] = {}  # whose last turn is not in the past
        self._most_idle = _FEW
        self._now = 0.0

    def arrive(self, name: str, weight: float) -> None:
        """It has someone waiting now."""
        flow = self.busy.get(name)
        if flow is None:
            flow = self.busy[name] = self._idle.pop(name) if name in self._idle else _Flow()
            flow.start = max(self._now, flow.finish)
        flow.weight = weight

    def serve(self, name: str, cost: float, *, more: bool) -> None:
        """One of it goes; `more` wait."""
        flow = self.busy[name]
        self._now = max(self._now, flow.start)
        flow.start = flow.finish = flow.start + cost
        if not more:
            self.leave(name)

    def pass_through(self, name: str, cost: float) -> None:
        """One of a flow of which nobody waits comes and goes."""
        flow = self._idle.pop(name, None) or _Flow()
        if flow.finish > self._now:
            self._now = flow.finish
        flow.finish = self._now + cost
        self._rest(name, flow)

    def leave(self, name: str) -> None:
        """Nobody of it waits any more."""
        self._rest(name, self.busy.pop(name))

    def _rest(self, name: str, flow: _Flow) -> None:
        if flow.finish > self._now:
            self._idle[name] = flow
        if len(self._idle) > self._most_idle:
            self._forget()

    def order(self) -> list[str]:
        """Those who have someone waiting, whose turn comes first before others; of two, the heavier one."""
        return [name for *_, name in sorted((f.start, -f.weight, name) for name, f in self.busy.items())]

    def _forget(self) -> None:
        """An idle flow whose last turn is in the past is as good as new. Seldom enough to cost nothing."""
        self._idle = {name: flow for name, flow in self._idle.items() if flow.finish > self._now}
        self._most_idle = max(_FEW, 2 * len(self._idle))


class _Leaf:
    """Those of one user, by their pools, in the order of their deadlines."""

    __slots__ = ("_pools", "count")

    def __init__(self) -> None:
        self._pools: dict[Hashable, list[tuple[float, int, Waiting]]] = {}
        self.count = 0

    def push(self, waiting: Waiting, arrival: int) -> None:
        heapq.heappush(self._pools.setdefault(waiting.pool, []), (waiting.deadline, arrival, waiting))
        self.count += 1

    def take_out(self, waiting: Waiting) -> None:
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


class _Users:
    """Those of one tenant, in the order of their turns.

    Clients make their names up. So nothing is kept of one who has nobody waiting, and who comes is behind all
    who are here: no row of new names keeps anybody waiting for ever.
    """

    __slots__ = ("_leaves", "count")

    def __init__(self) -> None:
        self._leaves: dict[str, _Leaf] = {}
        self.count = 0

    def push(self, waiting: Waiting, path: _Path, arrival: int) -> None:
        leaf = self._leaves.get(waiting.user)
        if leaf is None:
            leaf = self._leaves[waiting.user] = _Leaf()
        leaf.push(waiting, arrival)
        self.count += 1

    def take_out(self, waiting: Waiting, path: _Path, *, served: bool) -> None:
        leaf = self._leaves[waiting.user]
        leaf.take_out(waiting)
        self.count -= 1
        if served or not leaf.count:
            del self._leaves[waiting.user]
        if served and leaf.count:
            self._leaves[waiting.user] = leaf  # the last from now on

    def candidates(self) -> Iterator[Waiting]:
        """In fair order."""
        for leaf in self._leaves.values():
            yield from leaf.candidates()


class _Branch:
    """Flows that compete, each with those of its own below it."""

    __slots__ = ("_keeps", "_level", "children", "count")

    def __init__(self, *, keeps: bool = False) -> None:
        """`keeps`: what is below a flow stays when nobody waits there, and remembers who had a turn."""
        self._keeps = keeps
        self._level = _Level()
        self.children: dict[str, _Branch | _Users] = {}
        self.count = 0

    def push(self, waiting: Waiting, path: _Path, arrival: int) -> None:
        (name, weight, _), *rest = path
        child = self.children.get(name)
        if child is None:
            child = self.children[name] = _Branch() if rest else _Users()
        child.push(waiting, rest, arrival)
        self.count += 1
        self._level.arrive(name, weight)

    def take_out(self, waiting: Waiting, path: _Path, *, served: bool) -> None:
        (name, weight, cost), *rest = path
        child = self.children[name]
        child.take_out(waiting, rest, served=served)
        self.count -= 1
        if served:
            self._level.serve(name, cost / weight, more=child.count > 0)
        elif not child.count:
            self._level.leave(name)
        if not (child.count or self._keeps):
            del self.children[name]

    def pass_through(self, waiting: Waiting, cost: float) -> None:
        """One that comes while nobody waits here, and is served."""
        self._level.pass_through(waiting.sla, min(cost, _MOST_OF_CLASS) / waiting.weight)
        child = self.children.get(waiting.sla)
        if child is None:
            child = self.children[waiting.sla] = _Branch()
        assert isinstance(child, _Branch)
        child._level.pass_through(waiting.tenant, cost / waiting.tenant_weight)

    def candidates(self) -> Iterator[Waiting]:
        """In fair order."""
        for name in self._level.order():
            yield from self.children[name].candidates()


class FairQueue:
    """See the module. `push` what waits, `take` who is next of those that fit, `remove` who has left."""

    def __init__(self) -> None:
        self._root = _Branch(keeps=True)
        self._arrivals = itertools.count()
        self._pools: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return self._root.count

    def counts(self) -> dict[str, int]:
        """How many wait, by class."""
        return {name: child.count for name, child in self._root.children.items()}

    def push(self, waiting: Waiting) -> None:
        self._pools[waiting.pool] += 1
        self._root.push(waiting, waiting.path, next(self._arrivals))

    def at_once(self, waiting: Waiting, fits: Callable[[Waiting], bool]) -> bool:
        """`push` and `take` in one, of one that fits while nobody waits. False if that is not so."""
        if len(self) or not fits(waiting):
            return False
        waiting.gone = True
        self._root.pass_through(waiting, max(waiting.cost, _LEAST_COST))
        return True

    def remove(self, waiting: Waiting) -> None:
        """It has left without being served. Harmless if it is not here any more."""
        if not waiting.gone:
            self._take_out(waiting, served=False)

    def take(self, fits: Callable[[Waiting], bool]) -> Waiting | None:
        """The first, in fair order, of those that fit; it is in the queue no longer.

        `fits` is asked in that order, and of each pool only for the first that waits.
        """
        full: set[Hashable] = set()
        for waiting in self._root.candidates():
            if waiting.pool in full:
                continue
            if fits(waiting):
                self._take_out(waiting, served=True)
                return waiting
            full.add(waiting.pool)
            if len(full) == len(self._pools):
                break
        return None

    def _take_out(self, waiting: Waiting, *, served: bool) -> None:
        self._root.take_out(waiting, waiting.path, served=served)
        self._pools[waiting.pool] -= 1
        if not self._pools[waiting.pool]:
            del self._pools[waiting.pool]
