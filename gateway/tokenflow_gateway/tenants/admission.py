"""The queue before the engines: a stream goes to one that can begin with it in time, or waits here, for free.

Engines tell over the link who waits in them and how fast streams begin (`engines.load`). One without a
plugin, or with its link down, takes everybody at once: nothing waits here, the engine queues as ever; but
where it is configured how many it runs, not many more.

Nobody goes to an engine for which somebody waits who is before it in fair order, but those of a heavier
class; and of these too, nobody once that one has waited for half of the longest wait. So patient streams do
not keep an engine full for ever that urgent ones wait for, nor heavy classes one that a light one waits for:
from then on it has its share by weight.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Literal

import msgspec

from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.engines.placement import Placement, Wish
from tokenflow_gateway.relay.errors import ModelNotFound, NoEngine, QueueFull, QueueTimeout
from tokenflow_gateway.tenants.admission_settings import AdmissionSettings
from tokenflow_gateway.tenants.fair_queue import FairQueue, Waiting

__all__ = ["Admission", "AdmissionOutcome", "Entrant", "Ticket"]

_LOOK_EVERY_S = 0.1
"""How often those who wait are looked at when no engine has told anything new."""

_OVERDUE = ""
"""In the place of the class of one that has waited for long: no class goes before it."""

AdmissionOutcome = Literal["at_once", "waited", "full", "timeout", "left"]


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that wants to begin."""

    sla: str
    weight: float
    """Of its class."""
    tenant: str
    tenant_weight: float
    user: str
    """Of the tenant's, where it says so."""
    cost: float
    """Tokens that it is expected to take."""
    due_s: float
    """Until its first token is due, as it counts among those of the same user."""
    wish: Wish
    pool: Hashable
    """What tells its engines from those of others: its model, and the engines that it may be sent to."""
    engines: Callable[[], Sequence[Engine]]
    """Those that may be asked now. May raise `NoEngine`."""


class Ticket(msgspec.Struct, eq=False):
    """An entrant's place in the queue, or its engine."""

    entrant: Entrant
    since: float
    waiting: Waiting | None = None
    engine: Engine | None = None
    """Where the stream is to be sent, once that is known."""
    given: asyncio.Event | None = None
    """For who waits."""


def _uncounted(_sla: str, _outcome: AdmissionOutcome, _waited_s: float) -> None:
    pass


class Admission:
    """See the module. `run` looks after those who wait, until cancelled."""

    def __init__(
        self,
        settings: AdmissionSettings,
        placement: Placement,
        sent_to: Callable[[Engine], None],
        *,
        floors: dict[str, float] | None = None,
        enabled: bool = True,
        count: Callable[[str, AdmissionOutcome, float], None] = _uncounted,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`floors`: shares of the places that are kept for classes. `count` hears how each wait ended."""
        self._placement = placement
        self._sent_to = sent_to
        self._count = count
        self._clock = clock
        self._queue = FairQueue()
        self._tickets: dict[Waiting, Ticket] = {}
        self._news = asyncio.Event()
        self.update(settings, floors=floors or {}, enabled=enabled)

    def update(self, settings: AdmissionSettings, *, floors: dict[str, float], enabled: bool) -> None:
        """Other settings from now on; those who wait go on waiting."""
        self._settings = settings
        self._kept = {name: int(share * settings.max_waiting) for name, share in floors.items()}
        self._placement.engine_queue = settings.engine_queue
        self._enabled = enabled
        self._news.set()

    @property
    def waiting(self) -> dict[str, int]:
        """How many wait, by class."""
        return self._queue.counts()

    def changed(self) -> None:
        """Something has happened that may make room: an engine has told of itself, or a stream has ended."""
        if self._tickets:
            self._news.set()

    def enter(self, entrant: Entrant) -> Ticket:
        """With an engine, where one has room at once; otherwise it has to `wait`.

        Raises `ModelNotFound`, `NoEngine` or `QueueFull`.
        """
        engines = entrant.engines()
        ticket = Ticket(entrant, since=self._clock())
        if not self._enabled:
            ticket.engine = self._placement.least_loaded(engines, entrant.wish, ticket.since)
            self._sent_to(ticket.engine)
            return ticket
        ticket.waiting = waiting = Waiting(
            sla=entrant.sla,
            weight=entrant.weight,
            tenant=entrant.tenant,
            tenant_weight=entrant.tenant_weight,
            user=entrant.user,
            cost=entrant.cost,
            deadline=ticket.since + entrant.due_s,
            pool=(entrant.sla, entrant.pool),
        )
        if self._queue.at_once(waiting, lambda _: self._choose(ticket, engines, {})):
            assert ticket.engine is not None
            self._sent_to(ticket.engine)
            self._count(entrant.sla, "at_once", 0.0)
            return ticket
        ticket.given = asyncio.Event()
        may_wait = self._has_room(entrant.sla)
        self._tickets[waiting] = ticket
        self._queue.push(waiting)
        self._serve()
        if ticket.engine is not None:
            self._count(entrant.sla, "at_once", 0.0)
        elif not may_wait:
            self._leave(waiting)
            self._count(entrant.sla, "full", 0.0)
            raise QueueFull(entrant.sla)
        return ticket

    async def wait(self, ticket: Ticket) -> Engine:
        """The engine, after a while. Whoever has entered has to wait, or be cancelled while it does.

        Raises `QueueTimeout`. A caller that is cancelled leaves nothing behind.
        """
        if ticket.engine is not None:
            return ticket.engine
        assert ticket.waiting is not None
        assert ticket.given is not None
        self._news.set()
        outcome: AdmissionOutcome = "left"
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.max_wait_s):
                    await ticket.given.wait()
            outcome = "timeout" if ticket.engine is None else "waited"
        finally:
            self._leave(ticket.waiting)
            self._count(ticket.entrant.sla, outcome, self._clock() - ticket.since)
        if ticket.engine is None:
            raise QueueTimeout(self._settings.max_wait_s)
        return ticket.engine

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S if self._tickets else None):
                    await self._news.wait()
            self._news.clear()
            self._serve()

    def _serve(self) -> None:
        """Send on, in fair order, as many as engines have room for."""
        while self._tickets:
            waiting = self._queue.take(partial(self._find_engine, waited_for={}))
            if waiting is None:
                return
            self._send_on(waiting)

    def _send_on(self, waiting: Waiting) -> None:
        """An engine has been found for it."""
        ticket = self._tickets.pop(waiting)
        assert ticket.engine is not None
        assert ticket.given is not None
        self._sent_to(ticket.engine)
        ticket.given.set()

    def _find_engine(self, waiting: Waiting, waited_for: dict[Engine, set[str]]) -> bool:
        """Whether there is an engine for it, which its ticket then has.

        `waited_for`: by which classes, of those earlier in fair order for whom there was none.
        """
        ticket = self._tickets[waiting]
        entrant = ticket.entrant
        try:
            engines = entrant.engines()
        except (ModelNotFound, NoEngine):
            return False  # they may come back while it waits
        if not self._enabled:
            ticket.engine = self._placement.least_loaded(engines, entrant.wish, self._clock())
            return True
        return self._choose(ticket, engines, waited_for)

    def _choose(self, ticket: Ticket, engines: Sequence[Engine], waited_for: dict[Engine, set[str]]) -> bool:
        """Whether one of these engines has room for it. `waited_for` as in `_find_engine`."""
        entrant, now = ticket.entrant, self._clock()
        open_to_it = engines
        if waited_for:
            behind = entrant.wish.behind
            open_to_it = [engine for engine in engines if waited_for.get(engine, frozenset()) <= behind]
        ticket.engine = self._placement.choose(open_to_it, entrant.wish, now)
        if ticket.engine is None:
            is_overdue = now - ticket.since > self._settings.max_wait_s / 2
            for engine in engines:
                waited_for.setdefault(engine, set()).add(_OVERDUE if is_overdue else entrant.sla)
        return ticket.engine is not None

    def _leave(self, waiting: Waiting) -> None:
        self._tickets.pop(waiting, None)
        self._queue.remove(waiting)

    def _has_room(self, sla: str) -> bool:
        """Whether one more of this class may wait: in a place kept for it, or in one that is for all."""
        counts = self._queue.counts()
        if counts.get(sla, 0) < self._kept.get(sla, 0):
            return True
        free = self._settings.max_waiting - sum(self._kept.values())
        shared = sum(max(0, count - self._kept.get(name, 0)) for name, count in counts.items())
        return shared < free
