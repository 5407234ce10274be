"""The guard ends a request when its client leaves or its engine is late, and only then."""

from __future__ import annotations

import asyncio

import pytest

from tokenflow_gateway.relay.errors import EngineTimeout
from tokenflow_gateway.relay.guard import ClientGone, RequestGuard


class Client:
    """An ASGI `receive` that disconnects when told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_a_body_that_finishes_is_left_alone() -> None:
    async with RequestGuard(Client().receive) as guard:
        guard.expect(10, "nothing")
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


async def test_a_late_engine_ends_the_wait_and_says_in_which_phase() -> None:
    with pytest.raises(EngineTimeout, match=r"no answer within 0\.01 s"):
        async with RequestGuard(Client().receive) as guard:
            guard.expect(0.01, "no answer")
            await asyncio.Event().wait()


async def test_progress_moves_the_deadline() -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(EngineTimeout):
        async with RequestGuard(Client().receive) as guard:
            guard.expect(0.02, "nothing")
            guard.extend(0.1)
            await asyncio.Event().wait()
    assert loop.time() - begun >= 0.1


async def test_waiting_for_the_client_has_no_deadline_and_the_next_phase_has_one_again() -> None:
    fired = asyncio.Event()
    loop = asyncio.get_running_loop()
    with pytest.raises(EngineTimeout):
        async with RequestGuard(Client().receive) as guard:
            guard.expect(0.01, "nothing")
            guard.hold()
            loop.call_later(0.05, fired.set)
            await fired.wait()
            guard.extend(0.01)
            await asyncio.Event().wait()


async def test_a_shorter_deadline_counts() -> None:
    with pytest.raises(EngineTimeout):
        async with RequestGuard(Client().receive) as guard:
            guard.expect(60, "nothing")
            guard.expect(0.01, "nothing")
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
