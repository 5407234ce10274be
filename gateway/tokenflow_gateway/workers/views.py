"""What the control API shows of one worker, and of all together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from prometheus_client import generate_latest

from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.metrics import Metrics
from tokenflow_gateway.relay.stream import StreamTable
from tokenflow_gateway.workers import counters
from tokenflow_gateway.workers.counters import Family, KeptCounters
from tokenflow_gateway.workers.peers import Peers, Unreachable, View, Wanted
from tokenflow_gateway.workers.worker import Worker

__all__ = ["LISTED_STREAMS", "READY", "OwnViews", "Views"]

LISTED_STREAMS = 500
"""Longest list ``/admin/streams`` answers with; `total` counts them all."""
READY = "ok"

Shown: TypeAlias = dict[str, Any]

T = TypeVar("T")


class OwnViews:
    """What this process knows itself."""

    def __init__(
        self,
        worker: Worker,
        registry: EngineRegistry,
        streams: StreamTable,
        metrics: Metrics,
        stopping: Callable[[], bool],
    ) -> None:
        self._worker = worker
        self._registry = registry
        self._streams = streams
        self._metrics = metrics
        self._stopping = stopping
        self._kept = None if worker.is_alone else KeptCounters(worker.counters(worker.index))

    def show(self, view: View) -> Any:
        """One of them, by its name."""
        return getattr(self, view)()

    def status(self) -> str:
        """Whether requests can be served, in words: `READY` if so."""
        if self._stopping():
            return "shutting down"
        return READY if self._registry.ready() else "no healthy engine"

    def engines(self) -> list[Shown]:
        return [engine.view() for engine in self._registry]

    def streams(self) -> tuple[int, list[Shown]]:
        """How many there are, and the oldest of them."""
        now = time.monotonic()
        listed = sorted(self._streams, key=lambda stream: stream.started)[:LISTED_STREAMS]
        return len(self._streams), [self._of_worker(stream.view(now)) for stream in listed]

    def metrics(self) -> list[Family]:
        own = counters.families(self._metrics.registry)
        return self._kept.add_to(own) if self._kept else own

    def keep_counters(self) -> None:
        """The process ends in order: for the worker after it, and those that go on."""
        if self._kept:
            self.metrics()

    def text(self) -> bytes:
        """The metrics of a gateway of one process."""
        return generate_latest(self._metrics.registry)

    def _of_worker(self, shown: Shown) -> Shown:
        return shown if self._worker.is_alone else {**shown, "worker": self._worker.index}


class Views:
    """What all workers know. One that does not answer is left out, and the gateway is not ready."""

    def __init__(self, worker: Worker, own: OwnViews, peers: Peers) -> None:
        self._worker = worker
        self._own = own
        self._peers = peers

    async def status(self) -> str:
        """`READY` if all workers are; else the first reason against it."""
        statuses: Sequence[str | None] = await self._all("status", str)
        reasons = ["a worker does not answer" if status is None else status for status in statuses]
        return next((reason for reason in reasons if reason != READY), READY)

    async def engines(self) -> list[Shown]:
        shown = [part for part in await self._all("engines", list[Shown]) if part is not None]
        return [_one_engine(views) for views in zip(*shown, strict=True)]

    async def streams(self) -> tuple[int, list[Shown]]:
        """How many there are, and the oldest of them."""
        parts = [part for part in await self._all("streams", tuple[int, list[Shown]]) if part is not None]
        together = sorted((view for _, views in parts for view in views), key=lambda view: -view["age_s"])
        return sum(total for total, _ in parts), together[:LISTED_STREAMS]

    async def metrics(self) -> bytes:
        """In Prometheus' text format."""
        if self._worker.is_alone:
            return self._own.text()
        told = await self._all("metrics", list[Family])
        parts = [
            counters.read(self._worker.counters(index)) if part is None else part
            for index, part in enumerate(told)
        ]
        return counters.as_text(counters.merged(parts))

    async def _all(self, view: View, kind: type[T]) -> list[T | None]:
        """Each worker's, by index; None for one that does not answer."""
        return await asyncio.gather(*(self._one(index, view, kind) for index in range(self._worker.count)))

    async def _one(self, index: int, view: View, kind: type[T]) -> T | None:
        if index == self._worker.index:
            own: T = self._own.show(view)
            return own
        try:
            return await self._peers.ask(index, Wanted(view), kind)
        except Unreachable:
            return None


def _one_engine(views: Sequence[Shown]) -> Shown:
    """One engine as all workers see it; its own word comes from one that is linked."""
    linked = next((view for view in views if view["linked"]), views[0])
    return {
        **linked,
        "healthy": all(view["healthy"] for view in views),
        "linked": all(view["linked"] for view in views),
        "reason": next((view["reason"] for view in views if view["reason"]), None),
        "streams": sum(view["streams"] for view in views),
    }
