"""Which engines of a fleet are draining: said to one gateway, known to all."""

from __future__ import annotations

import asyncio
import contextlib

from tokenflow_gateway.engines.draining import LocalDraining
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.store.redis import FleetStore, StoreDown, as_bytes

__all__ = ["SharedDraining"]


class SharedDraining:
    """What is said while Redis is gone holds here, and everywhere once it is back."""

    def __init__(self, store: FleetStore, registry: EngineRegistry) -> None:
        self._store = store
        self._registry = registry
        self._local = LocalDraining(registry)
        self._unsaid: dict[str, bool] = {}
        self._lock = asyncio.Lock()
        store.on_return.append(self._meet)
        store.on_beat.append(self._exchange)

    async def set(self, name: str, *, draining: bool) -> None:
        self._local.apply(name, draining=draining)
        self._unsaid[name] = draining
        with contextlib.suppress(StoreDown):
            await self._exchange()

    async def _meet(self, forgotten: bool) -> None:
        if forgotten:
            self._unsaid |= {engine.name: True for engine in self._registry if engine.draining}
        # what is there is taken with the first beat

    async def _exchange(self) -> None:
        async with self._lock, self._store.asking() as client:
            key = self._store.key("draining")
            said = dict(self._unsaid)
            for name, draining in said.items():
                await (client.hset(key, name, "1") if draining else client.hdel(key, name))
            self._unsaid = {name: what for name, what in self._unsaid.items() if said.get(name) != what}
            found = {as_bytes(name).decode() for name in await client.hkeys(key)}
        for engine in self._registry:
            if engine.name not in self._unsaid:
                self._local.apply(engine.name, draining=engine.name in found)
