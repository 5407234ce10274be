"""One round over many: everything once, a few at a time, evenly, and nobody waits for all of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_gateway.readers import rounds
from tokenflow_gateway.readers.rounds import AT_A_TIME, one_round


@given(st.integers(0, 10 * AT_A_TIME))
def test_everything_comes_once_and_a_few_at_a_time(count: int) -> None:
    async def parts() -> list[list[int]]:
        return [list(part) async for part in one_round(range(count), within_s=0.0)]

    found = asyncio.run(parts())
    assert sorted(thing for part in found for thing in part) == list(range(count))
    assert max(map(len, found)) <= AT_A_TIME
    assert max(map(len, found)) - min(map(len, found)) <= 1, "evenly"


async def test_others_have_a_turn_before_each_part() -> None:
    turns = 0

    def tick() -> None:
        nonlocal turns, ticking
        turns += 1
        ticking = loop.call_soon(tick)

    loop = asyncio.get_running_loop()
    ticking = loop.call_soon(tick)
    seen = [turns async for _ in one_round(range(5 * AT_A_TIME), within_s=0.0)]
    ticking.cancel()
    assert len(set(seen)) == 5


async def test_who_comes_before_the_first_part_need_not_wait_for_another_round() -> None:
    things: list[int] = []
    asyncio.get_running_loop().call_soon(things.append, 1)
    assert [list(part) async for part in one_round(things, within_s=0.0)] == [[1]]


async def test_who_is_cancelled_keeps_nothing() -> None:
    """Its frames may live on with the exception, and with them all streams that they know of."""
    kept: list[list[int]] = []

    async def look() -> None:
        async for part in one_round(range(2 * AT_A_TIME), within_s=1e-3):
            kept.append(part)
            await asyncio.sleep(0)
            if len(kept) == 1:
                asyncio.current_task().cancel()  # type: ignore[union-attr]

    with pytest.raises(asyncio.CancelledError):
        await look()
    assert kept == [[]]


class Clock:
    """In the place of the event loop's: time passes in sleep, and where a test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        loop = SimpleNamespace(time=lambda: self.now)
        stand_in = SimpleNamespace(sleep=self.sleep, get_running_loop=lambda: loop)
        patch.setattr(rounds, "asyncio", stand_in)

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


async def test_a_round_is_spread_over_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    at = [clock.now async for _ in one_round(range(4 * AT_A_TIME), within_s=0.1)]
    assert at == pytest.approx([100.025, 100.05, 100.075, 100.1])


async def test_what_takes_long_is_caught_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    at = []
    async for _ in one_round(range(4 * AT_A_TIME), within_s=0.1):
        at.append(clock.now)
        clock.now += 0.04 if len(at) == 1 else 0.0
    assert at == pytest.approx([100.025, 100.065, 100.075, 100.1])


async def test_a_round_over_nothing_takes_its_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever begins one after another would otherwise do nothing else."""
    clock = Clock(monkeypatch)
    assert [part async for part in one_round((), within_s=0.1)] == [[]]
    assert clock.now == pytest.approx(100.1)
