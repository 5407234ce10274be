"""Engines that are to get nothing new, because somebody has said so."""

from __future__ import annotations

from typing import Protocol

import structlog

from tokenflow_gateway.engines.registry import EngineRegistry

__all__ = ["Draining", "LocalDraining"]

_log = structlog.stdlib.get_logger("tokenflow.engines")


class Draining(Protocol):
    """Tells all who choose among the engines."""

    async def set(self, name: str, *, draining: bool) -> None:
        """From now on; `name` is a configured engine's."""


class LocalDraining:
    """For a process that chooses alone."""

    def __init__(self, registry: EngineRegistry) -> None:
        self._registry = registry

    async def set(self, name: str, *, draining: bool) -> None:
        self.apply(name, draining=draining)

    def apply(self, name: str, *, draining: bool) -> None:
        engine = self._registry.get(name)
        if engine is not None and engine.draining != draining:
            engine.draining = draining
            _log.info("engine is draining" if draining else "engine takes requests again", engine=name)
