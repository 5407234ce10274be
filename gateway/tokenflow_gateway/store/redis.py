"""The connection to a fleet's Redis: whether it is there, which replicas are, and what it has forgotten.

Nothing waits for a Redis that does not answer: the first call that fails takes it out of use until a
background task has reached it again, and everything that the gateway did meanwhile has been told
(`on_return`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from tokenflow_gateway.store.settings import RedisSettings

__all__ = ["LEASE_S", "FleetStore", "StoreDown", "as_bytes"]

_log = structlog.stdlib.get_logger("tokenflow.store")

ANSWER_WITHIN_S: Final = 1.0
"""For one round trip, which takes less than a millisecond. A request waits for this once when Redis goes."""
_RETRY_S: Final = 0.5
_HEARTBEAT_S: Final = 2.0
LEASE_S: Final = 10.0
"""A replica that has not been heard of for so long is gone, and so are its open requests."""
_FAILURES: Final = (RedisError, OSError, TimeoutError)


class StoreDown(Exception):
    """Redis cannot be asked now."""


class FleetStore:
    """See the module. `run` keeps it until cancelled; everything else may be called at any time."""

    def __init__(self, settings: RedisSettings, member: str) -> None:
        """`member`: this process's name among the replicas, different in each."""
        self.member = member
        self.prefix = settings.prefix
        pool = BlockingConnectionPool.from_url(
            settings.url.get_secret_value(),
            max_connections=settings.max_connections,
            timeout=ANSWER_WITHIN_S,
            socket_timeout=None,  # redis-py's own loses cancellations (asyncio.wait_for of Python 3.11)
            socket_connect_timeout=ANSWER_WITHIN_S,
            retry=Retry(NoBackoff(), 0),
        )
        self.client: Redis = Redis.from_pool(pool)
        self.up = False
        self.lost = 0
        """How many times it has gone away."""
        self.members: tuple[str, ...] = (member,)
        """Processes that share it, as last seen."""
        self.ahead_s = 0.0
        """Its clock, less this machine's."""
        self.on_return: list[Callable[[bool], Awaitable[None]]] = []
        """Called before it is used again; True if it has forgotten what it knew. May raise `StoreDown`."""
        self.on_beat: list[Callable[[], Awaitable[None]]] = []
        """Called every two seconds while it is there."""
        self.epoch = ""
        """What the Redis that was met last is known by, until it forgets."""
        self._told_epoch = ""
        """Of the one that has been told everything."""
        self._gone = asyncio.Event()
        self._said: str | None = None

    def key(self, *parts: str) -> str:
        return ":".join((self.prefix, *parts))

    @property
    def replicas(self) -> int:
        """How many processes share it, as last seen."""
        return len(self.members)

    @property
    def now(self) -> float:
        """Its wall clock, as far as it is known."""
        return time.time() + self.ahead_s

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Redis]:
        """For calls inside. Raises `StoreDown`, at once where it is known to be gone."""
        if not self.up:
            raise StoreDown
        try:
            async with self.reaching():
                yield self.client
        except StoreDown as error:
            self._fail(str(error))
            raise

    @asynccontextmanager
    async def reaching(self, within_s: float | None = None) -> AsyncIterator[Redis]:
        """The same whether or not it is in use: for `on_return`."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S if within_s is None else within_s):
                yield self.client
        except _FAILURES as error:
            raise StoreDown(str(error) or "no answer in time") from error

    async def start(self) -> None:
        """Reach it before the first request, if it is there."""
        await self._try()

    async def run(self) -> None:
        try:
            while True:
                if self.up:
                    await self._beat()
                elif not await self._try():
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._gone.clear()
                if self.up:
                    await _wait(self._gone, _HEARTBEAT_S)
        finally:
            await self._leave()

    async def _try(self) -> bool:
        try:
            self.epoch = await self._meet()
            forgotten = self._told_epoch not in {"", self.epoch}
            for tell in self.on_return:
                await tell(forgotten)
        except StoreDown as error:
            self._fail(str(error))
            return False
        self._told_epoch, self.up, self._said = self.epoch, True, None
        _log.info("redis is there", replicas=self.replicas, forgotten=forgotten)
        return True

    async def _meet(self) -> str:
        """Join the replicas. Returns the epoch: another one, if Redis is empty since it was met before."""
        async with self.reaching(2.0) as client:
            await client.set(self.key("epoch"), uuid.uuid4().hex, nx=True)
            epoch = _text(await client.get(self.key("epoch")))
            await self._join(client)
        return epoch

    async def _join(self, client: Redis) -> None:
        before = time.time()
        seconds, micros = await client.time()
        self.ahead_s = seconds + micros / 1e6 - (before + time.time()) / 2
        members = self.key("members")
        async with client.pipeline(transaction=False) as pipe:
            pipe.zadd(members, {self.member: self.now})
            pipe.zremrangebyscore(members, "-inf", self.now - LEASE_S)
            pipe.zrange(members, 0, -1)
            self._note_members((await pipe.execute())[-1])

    async def refresh_members(self) -> None:
        """Look who shares it now. Raises `StoreDown`."""
        async with self.asking() as client:
            self._note_members(await client.zrange(self.key("members"), 0, -1))

    def _note_members(self, found: list[Any]) -> None:
        self.members = tuple({self.member, *(_text(name) for name in found)})

    async def _beat(self) -> None:
        try:
            async with self.asking() as client:
                if _text(await client.get(self.key("epoch"))) != self.epoch:
                    raise RedisError("it has forgotten what it knew")
                await self._join(client)
            for beat in self.on_beat:
                await beat()
        except StoreDown:
            pass  # `asking` has seen to it

    def _fail(self, reason: str) -> None:
        if self.up:
            self.lost += 1
        self.up = False
        self._gone.set()
        if self._said is None:
            self._said = reason
            _log.warning("redis is gone: this replica goes on with limits of its own", reason=reason)

    async def _leave(self) -> None:
        try:
            if self.up:
                async with self.reaching() as client:
                    await client.zrem(self.key("members"), self.member)
        except StoreDown:
            pass
        finally:
            await self.client.aclose()


async def _wait(event: asyncio.Event, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        pass


def as_bytes(value: bytes | str) -> bytes:
    """What Redis holds, as this client gives it."""
    return value if isinstance(value, bytes) else value.encode()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
