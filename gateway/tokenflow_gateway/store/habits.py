"""What replicas have learned of readers, shared: news at once, a copy in Redis for those who come later."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from tokenflow_gateway.readers.learned import HALF_LIFE_S, Habit, LearnedRates
from tokenflow_gateway.store.messages import Messages
from tokenflow_gateway.store.redis import FleetStore, StoreDown, as_bytes

__all__ = ["SharedHabits"]

_EVERY_S: Final = 0.5
_KEPT_S: Final = int(2 * HALF_LIFE_S)
_AT_ONCE: Final = 200


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """A reader's evidence; `at` is wall-clock seconds."""

    name: bytes
    texts: float
    mean: float
    variance: float
    at: float


class SharedHabits(LearnedRates):
    """`run` tells what is learned here, and fetches what others know of a reader that comes, until cancelled.

    Opening a stream does not wait for that: a reader new to this replica is known from its next stream on.
    """

    def __init__(self, store: FleetStore, messages: Messages, *, key: bytes) -> None:
        super().__init__(key=key)
        self._store = store
        self._messages = messages
        self._learned: dict[bytes, None] = {}
        self._wanted: dict[bytes, None] = {}
        messages.hear("habits", self._hear)

    def habit(self, name: bytes, *, now: float) -> Habit | None:
        found = super().habit(name, now=now)
        if found is None and len(self._wanted) < _AT_ONCE:
            self._wanted[name] = None
        return found

    def learn(self, name: bytes, *, ratio: float, seconds: float, now: float) -> None:
        super().learn(name, ratio=ratio, seconds=seconds, now=now)
        self._learned[name] = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            learned, self._learned = list(self._learned)[:_AT_ONCE], {}
            wanted, self._wanted = list(self._wanted), {}
            try:
                if learned:
                    await self._tell(learned)
                if wanted:
                    await self._fetch(wanted)
            except StoreDown:
                self._learned = dict.fromkeys(learned) | self._learned

    async def _tell(self, names: list[bytes]) -> None:
        known = [known for name in names if (known := self._of(name)) is not None]
        async with self._store.asking() as client, client.pipeline(transaction=False) as pipe:
            for one in known:
                pipe.set(self._place(one.name), msgspec.msgpack.encode(one), ex=_KEPT_S)
            await pipe.execute()
        await self._messages.tell("habits", msgspec.msgpack.encode(known))

    async def _fetch(self, names: list[bytes]) -> None:
        async with self._store.asking() as client:
            found = await client.mget([self._place(name) for name in names])
        for encoded in found:
            if encoded is not None:
                self._take(msgspec.msgpack.decode(as_bytes(encoded), type=_Known))

    def _hear(self, news: bytes) -> None:
        for known in msgspec.msgpack.decode(news, type=list[_Known]):
            self._take(known)

    def _take(self, known: _Known) -> None:
        """What another replica knows; the later word holds."""
        now = time.monotonic()
        at = now - max(0.0, self._store.now - known.at)
        self.remember(known.name, texts=known.texts, mean=known.mean, variance=known.variance, at=at)

    def _of(self, name: bytes) -> _Known | None:
        evidence = self.evidence(name)
        if evidence is None:
            return None
        texts, mean, variance, at = evidence
        return _Known(name, texts, mean, variance, self._store.now - (time.monotonic() - at))

    def _place(self, name: bytes) -> str:
        return self._store.key("habit", name.hex())
