"""Calls of one Redis script, those that come at the same time in one round trip, in their order."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeAlias

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, ResponseError

from tokenflow_gateway.store.redis import FleetStore, StoreDown

__all__ = ["AT_ONCE", "Call", "ScriptQueue", "send_calls"]

AT_ONCE: Final = 100
"""Calls in one round trip."""

Value: TypeAlias = str | int | float
Call: TypeAlias = tuple[list[str], list[Value]]
"""Keys and arguments."""


class ScriptQueue:
    """`run` sends what has been called until cancelled."""

    def __init__(self, store: FleetStore, source: str) -> None:
        self._store = store
        self.script = store.client.register_script(source)
        self._waiting: list[tuple[Call, asyncio.Future[Any]]] = []
        self._news = asyncio.Event()

    def post(self, keys: list[str], args: list[Value]) -> asyncio.Future[Any]:
        """The script's answer, or `StoreDown`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._store.up:
            self._waiting.append(((keys, args), future))
            self._news.set()
        else:
            future.set_exception(StoreDown())
        return future

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                batch, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
                await self._send(batch)

    async def _send(self, batch: list[tuple[Call, asyncio.Future[Any]]]) -> None:
        answers: list[Any] | None = None
        try:
            async with self._store.asking() as client:
                answers = await send_calls(client, self.script, [call for call, _ in batch])
        except StoreDown:
            pass
        finally:  # whatever happens, nobody waits for ever
            for index, (_, future) in enumerate(batch):
                if future.done():  # its caller has left
                    continue
                if answers is None:
                    future.set_exception(StoreDown())
                else:
                    future.set_result(answers[index])


async def send_calls(client: Redis, script: AsyncScript, calls: list[Call]) -> list[Any]:
    """The answers, in order. Raises what `client` raises."""
    try:
        return await _pipelined(client, script, calls)
    except NoScriptError:  # none of them has run: the first would have failed, too
        await client.script_load(script.script)
        return await _pipelined(client, script, calls)


async def _pipelined(client: Redis, script: AsyncScript, calls: list[Call]) -> list[Any]:
    async with client.pipeline(transaction=False) as pipe:
        for keys, args in calls:
            pipe.evalsha(script.sha, len(keys), *keys, *args)
        answers = await pipe.execute(raise_on_error=False)
    failed = next((answer for answer in answers if isinstance(answer, ResponseError)), None)
    if failed is not None:
        raise failed
    return list(answers)
