"""The queue before the engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from support.gateway import eventually
from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.engines.placement import Placement, Wish
from tokenflow_gateway.relay.errors import NoEngine, QueueFull, QueueTimeout
from tokenflow_gateway.tenants.admission import Admission, Entrant
from tokenflow_gateway.tenants.admission_settings import AdmissionSettings


class Rooms(Placement):
    """Engines have as much room as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.free = 0
        self.least_ttft_s = 0.0
        """Streams with less would come too late, but for those that go before some class."""

    def choose(self, engines: list[Engine], wish: Wish, now: float) -> Engine | None:
        in_time = wish.ttft_s >= self.least_ttft_s or wish.behind
        return engines[0] if engines and self.free > 0 and in_time else None


ENGINE = Engine(EngineConfig(url="http://127.0.0.1:1"), healthy=True)


class Hall:
    def __init__(self, **settings: object) -> None:
        self.rooms = Rooms()
        self.sent = 0
        self.now = 0.0
        self.outcomes: list[str] = []
        floors = settings.pop("floors", {})
        self.admission = Admission(
            AdmissionSettings(**settings),
            self.rooms,
            self._sent,
            floors=floors,
            count=lambda sla, outcome, _s: self.outcomes.append(outcome),
            clock=lambda: self.now,
        )

    def _sent(self, _engine: Engine) -> None:
        self.sent += 1
        self.rooms.free -= 1

    def make_room(self, count: int = 1) -> None:
        self.rooms.free = count
        self.admission.changed()

    async def enter(
        self, tenant: str = "a", sla: str = "x", *, ttft_s: float = 1.0, weight: float = 1.0
    ) -> str:
        ticket = self.admission.enter(
            Entrant(
                sla=sla,
                weight=weight,
                tenant=tenant,
                tenant_weight=1.0,
                user="",
                cost=100.0,
                due_s=ttft_s,
                wish=Wish(ttft_s=ttft_s, behind=frozenset({"bronze"} if sla == "gold" else ())),
                pool="m",
                engines=self.engines,
            )
        )
        await self.admission.wait(ticket)
        return tenant

    def engines(self) -> list[Engine]:
        return [ENGINE]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Hall]:
        task = asyncio.create_task(self.admission.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until_waiting(self, count: int) -> None:
        await eventually(lambda: sum(self.admission.waiting.values()) == count, f"{count} wait")


async def test_with_room_a_stream_goes_at_once() -> None:
    async with Hall().open() as hall:
        hall.make_room()
        assert await hall.enter() == "a"
        assert hall.outcomes == ["at_once"]


async def test_without_room_it_waits_for_some() -> None:
    async with Hall().open() as hall:
        task = asyncio.create_task(hall.enter())
        await hall.until_waiting(1)
        assert not task.done()
        hall.make_room()
        assert await task == "a"
        assert hall.sent == 1
        assert hall.outcomes == ["waited"]


async def test_room_that_nobody_tells_of_is_found() -> None:
    """An engine whose link goes down takes everybody: nobody says so to the queue."""
    async with Hall().open() as hall:
        task = asyncio.create_task(hall.enter())
        await hall.until_waiting(1)
        hall.rooms.free = 1
        async with asyncio.timeout(10):
            await task


async def test_tenants_take_turns_however_many_one_sends() -> None:
    async with Hall().open() as hall:
        order: list[str] = []

        async def one(tenant: str) -> None:
            order.append(await hall.enter(tenant))

        tasks = [asyncio.create_task(one("flood")) for _ in range(20)]
        await hall.until_waiting(20)
        tasks += [asyncio.create_task(one("modest")) for _ in range(2)]
        await hall.until_waiting(22)
        for served in range(4):
            hall.make_room()
            await eventually(lambda served=served: len(order) > served, "one more is served")
        assert order.count("modest") == 2
        hall.make_room(100)
        await asyncio.gather(*tasks)


async def test_who_leaves_while_waiting_frees_its_place_and_takes_no_turn() -> None:
    async with Hall(max_waiting=1).open() as hall:
        gone = asyncio.create_task(hall.enter())
        await hall.until_waiting(1)
        with pytest.raises(QueueFull):
            await hall.enter()
        gone.cancel()
        await hall.until_waiting(0)
        staying = asyncio.create_task(hall.enter("b"))
        await hall.until_waiting(1)
        hall.make_room()
        assert await staying == "b"
        assert hall.sent == 1
        assert hall.outcomes == ["full", "left", "waited"]


async def test_who_is_patient_does_not_keep_an_engine_full_that_an_urgent_one_waits_for() -> None:
    async with Hall().open() as hall:
        hall.rooms.free, hall.rooms.least_ttft_s = 5, 10.0
        await hall.enter("patient", ttft_s=60)  # nobody waits
        urgent = asyncio.create_task(hall.enter("urgent", ttft_s=1))
        await hall.until_waiting(1)
        patient = asyncio.create_task(hall.enter("patient", ttft_s=60))
        await hall.until_waiting(2)
        hall.rooms.least_ttft_s = 0.0
        hall.admission.changed()
        assert await urgent == "urgent"
        assert await patient == "patient"


async def test_a_heavier_class_passes_a_lighter_one_but_none_that_has_waited_for_long() -> None:
    async with Hall(max_wait_s=60).open() as hall:
        hall.rooms.free, hall.rooms.least_ttft_s = 9, 10.0
        bronze = asyncio.create_task(hall.enter("b", "bronze"))
        await hall.until_waiting(1)
        hall.now = 29.0
        for _ in range(3):
            await hall.enter("g", "gold", weight=8)
        hall.now = 31.0
        gold = asyncio.create_task(hall.enter("g", "gold", weight=8))
        await hall.until_waiting(2)
        assert hall.sent == 3
        hall.rooms.least_ttft_s = 0.0
        hall.admission.changed()
        await asyncio.gather(bronze, gold)


async def test_who_need_not_wait_is_served_though_the_queue_is_full() -> None:
    async with Hall(max_waiting=1).open() as hall:
        hall.rooms.free, hall.rooms.least_ttft_s = 9, 10.0
        bronze = asyncio.create_task(hall.enter("b", "bronze"))
        await hall.until_waiting(1)
        await hall.enter("g", "gold", weight=8)
        with pytest.raises(QueueFull):
            await hall.enter("b", "bronze", ttft_s=60)
        hall.make_room(100)
        hall.rooms.least_ttft_s = 0.0
        await bronze
        assert hall.outcomes == ["at_once", "full", "waited"]


async def test_a_full_queue_turns_away_with_a_reason() -> None:
    async with Hall(max_waiting=0).open() as hall:
        with pytest.raises(QueueFull) as raised:
            await hall.enter()
        assert raised.value.status == 429
        assert (b"x-tokenflow-reason", b"queue_full") in raised.value.headers()
        hall.make_room()
        await hall.enter()  # what need not wait is not turned away


async def test_places_kept_for_a_class_are_there_when_the_others_fill_the_queue() -> None:
    async with Hall(max_waiting=10, floors={"gold": 0.2}).open() as hall:
        tasks = [asyncio.create_task(hall.enter("b", "bronze")) for _ in range(8)]
        await hall.until_waiting(8)
        with pytest.raises(QueueFull):
            await hall.enter("b", "bronze")
        tasks += [asyncio.create_task(hall.enter("g", "gold")) for _ in range(2)]
        await hall.until_waiting(10)
        with pytest.raises(QueueFull):
            await hall.enter("g", "gold")
        hall.make_room(100)
        await asyncio.gather(*tasks)


async def test_who_waits_for_too_long_is_turned_away() -> None:
    async with Hall(max_wait_s=0.05).open() as hall:
        with pytest.raises(QueueTimeout) as raised:
            await hall.enter()
        assert raised.value.status == 504
        assert (b"x-tokenflow-reason", b"queue_timeout") in raised.value.headers()
        assert hall.admission.waiting == {"x": 0}
        assert hall.outcomes == ["timeout"]


async def test_without_any_engine_nobody_waits_but_those_who_do_may_see_one_come_back() -> None:
    async with Hall().open() as hall:
        task = asyncio.create_task(hall.enter())
        await hall.until_waiting(1)

        def none() -> list[Engine]:
            raise NoEngine("none")

        hall.engines = none  # type: ignore[method-assign]
        with pytest.raises(NoEngine):
            await hall.enter("b")
        assert not task.done()
        hall.make_room()
        await task


async def test_switched_off_nobody_waits() -> None:
    hall = Hall()
    hall.admission.update(AdmissionSettings(), floors={}, enabled=False)
    hall.rooms.least_loaded = lambda engines, wish, now: engines[0]  # type: ignore[method-assign]
    assert await hall.enter() == "a"
