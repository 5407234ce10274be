"""The engine's end of the link as it should be: every stream that is closed is confirmed at once."""

from __future__ import annotations

import asyncio
from typing import Self

import msgspec

from tokenflow_engine.control.endpoint import default_endpoint, link_secret
from tokenflow_engine.control.owners import Confirmation, Delivery
from tokenflow_engine.control.server import LinkServer
from tokenflow_engine.protocol import (
    PROTOCOL_VERSION,
    Aborted,
    Consumption,
    EngineStats,
    StreamClosed,
    StreamOpened,
    Welcome,
)

__all__ = ["STATS", "WELCOME", "PluginStandIn"]

WELCOME = Welcome(
    version=PROTOCOL_VERSION,
    engine_id="stand-in",
    model="m",
    engine="sglang 0.5.23",
    capabilities=["count", "abort", "buffer"],
    kv_tokens=1000,
    max_running=8,
)
STATS = EngineStats(
    at=0.0,
    running=0,
    waiting=0,
    parked=0,
    kv_used_tokens=0,
    kv_tokens=1000,
    tokens_per_s=0.0,
    generated_total=0,
)


class PluginStandIn:
    """The real server of the link on the socket of the engine at `base_url`; a context manager.

    `opened` has the streams that were announced, `closed` those that were ended, with the reason. While
    `confirms` is False the ends are kept, as by an engine in a long pass.
    """

    def __init__(self, base_url: str) -> None:
        endpoint = default_endpoint(int(base_url.rpartition(":")[2]))
        self._server = LinkServer(endpoint, secret=link_secret(), welcome=WELCOME, stats=STATS)
        self.confirms = True
        self.generated = 0
        """The engine's own count of tokens in each confirmation."""
        self.opened: list[str] = []
        self.announced: dict[str, StreamOpened] = {}
        self.closed: dict[str, str] = {}
        self.late: list[str] = []
        """Streams of whose readers something was said after their end, or before they were announced."""

    def __enter__(self) -> Self:
        self._server.start()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._server.for_scheduler.fileno(), self._hear)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._loop.remove_reader(self._server.for_scheduler.fileno())
        self._server.close()

    def tells(self, **figures: object) -> None:
        """Its statistics from now on; what is not given is 0."""
        self._server.stats = msgspec.structs.replace(STATS, **figures)

    @property
    def open(self) -> set[str]:
        """The streams that the engine still has."""
        return set(self.opened) - set(self.closed)

    def _hear(self) -> None:
        for delivery in self._server.receive(limit=1000):
            match delivery.message:
                case StreamOpened(rid=rid):
                    self.opened.append(rid)
                    self.announced[rid] = delivery.message
                case StreamClosed(rid=rid, reason=reason):
                    self._close(delivery, rid, reason)
                case Consumption(readings=readings):
                    self.late += [reading.rid for reading in readings if reading.rid not in self.open]

    def _close(self, delivery: Delivery, rid: str, reason: str) -> None:
        self.closed[rid] = reason
        if self.confirms:
            aborted = Aborted(rid=rid, generated=self.generated, was_live=rid in self.opened)
            self._server.confirm(Confirmation(delivery.owner, aborted))
