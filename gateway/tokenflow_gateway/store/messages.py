"""Messages between the replicas of a fleet, over Redis' channels: questions to one of them, and news to all.

Nothing is kept for a replica that does not listen: a question to it fails at once, and news that it misses it
has to find where they are stored.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
from redis.exceptions import RedisError

from tokenflow_gateway.store.redis import FleetStore, StoreDown

__all__ = ["Messages", "NoAnswer"]

_log = structlog.stdlib.get_logger("tokenflow.store")

ANSWER_WITHIN_S: Final = 2.0
_RETRY_S: Final = 0.5


class NoAnswer(Exception):
    """A replica is not there (`gone`), or has not answered."""

    def __init__(self, member: str, *, gone: bool) -> None:
        super().__init__(f"replica {member} {'is not there' if gone else 'does not answer'}")
        self.gone = gone


class Messages:
    """`run` listens until cancelled."""

    def __init__(self, store: FleetStore) -> None:
        self._store = store
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._answer: Callable[[bytes], bytes] | None = None
        self._topics: dict[bytes, Callable[[bytes], None]] = {}
        self._ask, self._reply = self._channels(store.member)

    def answers(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer the questions of others by this; it may not wait."""
        self._answer = answer

    def hear(self, topic: str, take: Callable[[bytes], None]) -> None:
        """Have news of this kind, one's own included. Only before `run`."""
        self._topics[self._store.key("news", topic).encode()] = take

    async def ask(self, member: str, question: bytes) -> bytes:
        """The answer of a replica. Raises `NoAnswer`."""
        number = next(self._numbers)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        frame = msgspec.msgpack.encode((number, self._reply, question))
        try:
            async with self._store.asking() as client:
                listening = await client.publish(self._channels(member)[0], frame)
            if not listening:
                raise NoAnswer(member, gone=True)
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await future
        except (StoreDown, TimeoutError) as error:
            raise NoAnswer(member, gone=False) from error
        finally:
            del self._asked[number]

    async def tell(self, topic: str, news: bytes) -> None:
        """News for all. Raises `StoreDown`."""
        async with self._store.asking() as client:
            await client.publish(self._store.key("news", topic), news)

    async def run(self) -> None:
        while True:
            try:
                await self._listen()
            except (RedisError, OSError) as error:
                _log.debug("not listening to other replicas", reason=str(error))
            await asyncio.sleep(_RETRY_S)

    async def _listen(self) -> None:
        channels = self._store.client.pubsub(ignore_subscribe_messages=True)
        try:
            await channels.subscribe(self._ask, self._reply, *self._topics)
            async for message in channels.listen():
                await self._take(message["channel"], message["data"])
        finally:
            await channels.aclose()  # type: ignore[no-untyped-call]  # redis-py's

    async def _take(self, channel: bytes, data: bytes) -> None:
        try:
            if channel == self._ask.encode():
                await self._take_question(data)
            elif channel == self._reply.encode():
                number, answer = msgspec.msgpack.decode(data, type=tuple[int, bytes])
                if (future := self._asked.get(number)) is not None and not future.done():
                    future.set_result(answer)
            else:
                self._topics[channel](data)
        except (msgspec.DecodeError, StoreDown) as error:
            _log.warning("a message of another replica was not taken", reason=repr(error))

    async def _take_question(self, data: bytes) -> None:
        number, reply, question = msgspec.msgpack.decode(data, type=tuple[int, str, bytes])
        if self._answer is None:
            return
        answer = msgspec.msgpack.encode((number, self._answer(question)))
        async with self._store.asking() as client:
            await client.publish(reply, answer)

    def _channels(self, member: str) -> tuple[str, str]:
        return self._store.key("ask", member), self._store.key("reply", member)
