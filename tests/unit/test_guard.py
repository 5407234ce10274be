"""The guard ends a request when its client leaves or its engine is late, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from tokenflow_gateway.relay.errors import EngineTimeout, FirstByteTimeout, IdleTimeout, TotalTimeout
from tokenflow_gateway.relay.exchange import ClientConnection
from tokenflow_gateway.relay.guard import ClientGone, RequestGuard, TotalTime


class Client:
    """An ASGI `receive` that disconnects when told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_a_body_that_finishes_is_left_alone() -> None:
    async with RequestGuard(Client().receive) as guard:
        guard.expect(10, FirstByteTimeout)
        await asyncio.sleep(0)


async def test_a_client_that_leaves_ends_the_wait() -> None:
    client = Client()
    with pytest.raises(ClientGone):
        async with RequestGuard(client.receive):
            client.gone.set()
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


class Connection:
    """A client's connection that tells of its end."""

    def __init__(self) -> None:
        self.told: Callable[[], None] | None = None

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        self.told = on_lost


async def test_a_connection_that_tells_of_its_end_costs_no_task() -> None:
    connection = Connection()
    with pytest.raises(ClientGone):
        async with RequestGuard(Client().receive, connection=cast(ClientConnection, connection)):
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert connection.told is not None
            asyncio.get_running_loop().call_soon(connection.told)
            await asyncio.Event().wait()
    assert connection.told is None


async def test_a_connection_that_ends_after_the_request_ends_nothing() -> None:
    connection = Connection()
    async with RequestGuard(Client().receive, connection=cast(ClientConnection, connection)):
        told = connection.told
    assert told is not None
    told()
    await asyncio.sleep(0)


async def test_a_late_engine_ends_the_wait_and_says_in_which_phase() -> None:
    with pytest.raises(EngineTimeout, match=r"nothing of an answer within 0\.01 s"):
        async with RequestGuard(Client().receive) as guard:
            guard.expect(0.01, FirstByteTimeout)
            await asyncio.Event().wait()


async def test_progress_moves_the_deadline() -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(EngineTimeout):
        async with RequestGuard(Client().receive) as guard:
            guard.expect(0.02, FirstByteTimeout)
            guard.expect(0.1, IdleTimeout)
            await asyncio.Event().wait()
    assert loop.time() - begun >= 0.1


async def test_waiting_for_the_client_has_no_deadline_and_the_next_phase_has_one_again() -> None:
    fired = asyncio.Event()
    loop = asyncio.get_running_loop()
    with pytest.raises(EngineTimeout):
        async with RequestGuard(Client().receive) as guard:
            guard.expect(0.01, FirstByteTimeout)
            guard.hold()
            loop.call_later(0.05, fired.set)
            await fired.wait()
            guard.expect(0.01, IdleTimeout)
            await asyncio.Event().wait()


async def test_a_shorter_deadline_counts() -> None:
    with pytest.raises(EngineTimeout):
        async with RequestGuard(Client().receive) as guard:
            guard.expect(60, FirstByteTimeout)
            guard.expect(0.01, IdleTimeout)
            async with asyncio.timeout(5):
                await asyncio.Event().wait()


async def test_cancellation_from_outside_stays_a_cancellation() -> None:
    entered = asyncio.Event()

    async def request() -> None:
        async with RequestGuard(Client().receive):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_body_is_not_hidden() -> None:
    with pytest.raises(KeyError):
        async with RequestGuard(Client().receive):
            raise KeyError


async def test_what_was_no_progress_moves_no_deadline() -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(IdleTimeout):
        async with RequestGuard(Client().receive) as guard:
            guard.expect(0.05, IdleTimeout)
            while loop.time() < begun + 5:
                guard.resume(guard.hold())
                await asyncio.sleep(0.01)
    assert 0.05 <= loop.time() - begun < 1


@pytest.mark.parametrize("held", [False, True])
async def test_the_total_counts_from_the_arrival_whoever_is_waited_for(*, held: bool) -> None:
    loop = asyncio.get_running_loop()
    arrived = loop.time() - 1
    with pytest.raises(TotalTimeout, match=r"not done within 1\.05 s"):
        async with RequestGuard(Client().receive, TotalTime(1.05, arrived=arrived)) as guard:
            guard.expect(60, FirstByteTimeout)
            if held:
                guard.hold()
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
    assert loop.time() >= arrived + 1.05


async def test_a_phase_that_ends_before_the_total_is_what_is_told() -> None:
    arrived = asyncio.get_running_loop().time()
    with pytest.raises(IdleTimeout):
        async with RequestGuard(Client().receive, TotalTime(60, arrived=arrived)) as guard:
            guard.hold()
            guard.expect(0.01, IdleTimeout)
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
