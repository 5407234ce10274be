"""API keys of a fleet: what one gateway's store has, all know; hashes only, as at rest.

Each gateway adds the keys of its own store to Redis, and takes those of all. Nothing is ever taken away: of
two states of a key the one that ends it sooner holds, so that the order in which they are told is no matter.
Without Redis, and with one that has forgotten, a gateway goes on with all the keys that it has heard of.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import msgspec
import structlog
from redis.asyncio import Redis

from tokenflow_gateway.store.messages import Messages
from tokenflow_gateway.store.redis import FleetStore, StoreDown, as_bytes
from tokenflow_gateway.tenants.keyring import Keyring
from tokenflow_gateway.tenants.keys import KeyRecord

__all__ = ["SharedKeys"]

_log = structlog.stdlib.get_logger("tokenflow.keys")

_EVERY_S: Final = 1.0
_SOURCE: Final = "fleet"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KeyRecord).decode


class SharedKeys:
    """`run` keeps the keyring and Redis alike until cancelled."""

    def __init__(self, store: FleetStore, messages: Messages, keyring: Keyring) -> None:
        self._store = store
        self._messages = messages
        self._keyring = keyring
        self._fleet: dict[str, KeyRecord] = {}
        self._version: bytes | None = None
        self._news = asyncio.Event()
        messages.hear("keys", lambda _news: self._news.set())
        store.on_return.append(self._meet)

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._news.wait()
            self._news.clear()
            with contextlib.suppress(StoreDown):
                async with self._store.asking() as client:
                    pushed = await self._exchange(client)
                if pushed:
                    await self._messages.tell("keys", b"")

    async def _meet(self, _forgotten: bool) -> None:
        self._version = None
        async with self._store.reaching() as client:
            await self._exchange(client)

    async def _exchange(self, client: Redis) -> bool:
        """Take what is new, and give what is not there. Returns whether something was given."""
        keys, version_key = self._store.key("keys"), self._store.key("keys-version")
        told = await client.get(version_key)
        version = None if told is None else as_bytes(told)
        if self._version is None or version != self._version:
            self._version = version
            found = await client.hgetall(keys)
            self._take({as_bytes(name): as_bytes(record) for name, record in found.items()})
        missing: dict[Any, Any] = {
            record.id: _encode(record) for record in self._keyring if self._fleet.get(record.id) != record
        }
        if not missing:
            return False
        async with client.pipeline() as pipe:
            pipe.hset(keys, mapping=missing)
            pipe.incr(version_key)
            await pipe.execute()
        self._version = None  # somebody may have written in between
        self._fleet |= {record.id: record for record in self._keyring}
        return True

    def _take(self, told: dict[bytes, bytes]) -> None:
        fleet: dict[str, KeyRecord] = {}
        for name, encoded in told.items():
            try:
                record = _decode(encoded)
            except msgspec.DecodeError:
                _log.error(
                    "a key in redis cannot be read, and is left out", key=name.decode("ascii", "replace")
                )
                continue
            fleet[record.id] = record
        known = dict(self._fleet)
        for record in fleet.values():
            known[record.id] = record.merged(known[record.id]) if record.id in known else record
        self._fleet = fleet
        self._keyring.replace(known.values(), source=_SOURCE)
