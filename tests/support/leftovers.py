"""What requests have left behind: in the gateway, on its connections, in the engine, in the process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from structlog.testing import capture_logs
from structlog.typing import EventDict

from support.gateway import RunningGateway, eventually
from support.plugin_stand_in import PluginStandIn
from support.replay_engine import ReplayEngine
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.engine_answer import EngineAnswer
from tokenflow_gateway.relay.exchange import Exchange
from tokenflow_gateway.relay.guard import RequestGuard
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.tenants.admission import Ticket
from tokenflow_gateway.tenants.fair_queue import Waiting
from tokenflow_gateway.tenants.limits import LocalLimits

__all__ = ["Leftovers", "looking_for_leftovers", "open_files"]

PATIENCE_S = 10.0
"""For what is let go of to be gone."""
_POOLED = 4
"""Connections to the engine that may stay: the pool's, that of an abort, and those of probes."""
_OF_ALL = ("EnginePool._drop_idle", "Lifecycle._look_for_overdue", "EngineLink._tick")
"""Timers of which there is one for all requests, some until they find nothing any more."""


def open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd")) - 1  # the listing's own


_OF_ONE_REQUEST = (Exchange, Stream, Delivery, RequestGuard, EngineAnswer, Ticket, Waiting)


class Leftovers:
    """Compares with how things were when it was made: while nothing was asked of the gateway."""

    def __init__(
        self,
        gateway: RunningGateway,
        engine: ReplayEngine,
        plugin: PluginStandIn | None,
        logs: list[EventDict],
    ) -> None:
        self._gateway = gateway
        self._engine = engine
        self._plugin = plugin
        self._tasks = asyncio.all_tasks()
        self._gauges = self._gauges_now()
        self._files = self._other_files()
        self._logs = logs
        self.reported: list[str] = []
        """Faults that came to the event loop or to the HTTP server."""

    @property
    def faults(self) -> list[str]:
        """What was reported, or logged as an error."""
        logged = [str(entry) for entry in self._logs if entry["log_level"] in {"error", "critical"}]
        return [*self.reported, *logged]

    def all(self) -> list[str]:
        """Everything that is there and should not be, in words; empty if all is released."""
        return [
            *self.faults,
            *(f"stream on record: {stream.rid} ({stream.end})" for stream in self._gateway.streams),
            *(
                f"{engine.name} counts {engine.streams | engine.answered}"
                for engine in self._gateway.app.registry
                if engine.streams or engine.answered
            ),
            *(f"gauge {name}: {value}" for name, value in self._gauges_now() ^ self._gauges),
            *(f"task {task.get_coro()}" for task in asyncio.all_tasks() - self._tasks),
            *(f"timer of {owner}" for owner in (Counter(_timers()) - Counter(_OF_ALL)).elements()),
            *self.of_entry(),
            *self._of_engine(),
            *self._of_plugin(),
        ]

    async def none(self, after: str) -> None:
        """Wait until nothing is left. AssertionError with what is, and `after` what."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while (left := self.all()) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not left, f"after {after}: {left}"

    def _gauges_now(self) -> set[tuple[str, float]]:
        """All gauges that are not zero."""
        families = self._gateway.app.metrics.registry.collect()
        samples = [sample for family in families if family.type == "gauge" for sample in family.samples]
        return {(f"{sample.name}{sample.labels}", sample.value) for sample in samples if sample.value}

    def of_entry(self) -> Iterator[str]:
        """Places in the queue, and shares of limits."""
        fleet = self._gateway.app.fleet
        assert isinstance(fleet.limits, LocalLimits)
        yield from (
            f"{count} of class {name} wait" for name, count in fleet.admission.waiting.items() if count
        )
        for name, (_, _, requests) in fleet.limits.statistics().items():
            if requests:
                yield f"{requests} requests of {name} are open"

    def _of_engine(self) -> Iterator[str]:
        asked = [seen for seen in self._engine.requests if seen.method == "POST"]
        yield from (f"the engine works on {seen.path}" for seen in asked if not seen.done.is_set())
        if self._engine.open_connections > _POOLED:
            yield f"{self._engine.open_connections} connections to the engine"
        if (files := self._other_files()) != self._files:
            yield f"{files - self._files} more file descriptors"

    def _of_plugin(self) -> Iterator[str]:
        if self._plugin is not None:
            yield from (f"the plugin has {rid}" for rid in self._plugin.open)
            yield from (f"the plugin heard of {rid} out of turn" for rid in self._plugin.late)

    def _other_files(self) -> int:
        """Descriptors but for the two ends of connections to the engine."""
        return open_files() - 2 * self._engine.open_connections


def _timers() -> Iterator[str]:
    """Methods of the gateway's objects that the event loop is still to call."""
    for handle in asyncio.get_running_loop()._scheduled:  # type: ignore[attr-defined]
        owner = getattr(handle._callback, "__self__", None)
        if not handle.cancelled() and type(owner).__module__.startswith("tokenflow_gateway."):
            yield handle._callback.__qualname__


def _objects() -> list[object]:
    """What belongs to one request each, and is still in memory."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in _OF_ONE_REQUEST]


def _new(known: set[int]) -> list[str]:
    return [repr(thing)[:200] for thing in _objects() if id(thing) not in known]


@asynccontextmanager
async def looking_for_leftovers(
    gateway: RunningGateway, engine: ReplayEngine, plugin: PluginStandIn | None = None
) -> AsyncIterator[Leftovers]:
    """Leftovers of what happens inside; what only a collection shows fails the block at its end."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    server = logging.getLogger("uvicorn.error")
    others = _objects()  # of tests before this one; held, so that no id is given twice
    known = {id(thing) for thing in others}
    with capture_logs() as logs:
        leftovers = Leftovers(gateway, engine, plugin, logs)
        handler = _Reports(leftovers.reported)
        loop.set_exception_handler(lambda _loop, context: leftovers.reported.append(str(context)))
        server.addHandler(handler)
        try:
            yield leftovers
            await eventually(lambda: not _new(known), "all that belongs to a request is forgotten")
            assert not leftovers.faults
        finally:
            server.removeHandler(handler)
            loop.set_exception_handler(before)


class _Reports(logging.Handler):
    """Errors of the HTTP server, such as an application that raised; not that a grace is over."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("Cancel "):
            return
        self._into.append(f"{record.getMessage().strip()}: {record.exc_info and record.exc_info[1]!r}")
