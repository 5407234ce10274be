"""When the event loop waits for more chunks before it goes on, and when it does not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tokenflow_gateway.relay import coalescing
from tokenflow_gateway.relay.coalescing import ReadCoalescing


class Clock:
    """Time that passes only as it is told to, and in waits, which it counts."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waited_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.waited_s += seconds

    async def turn(self, reads: ReadCoalescing, *, busy_s: float = 0.0, chunks: int = 3) -> float:
        """Chunks go by in one turn of the loop, and take that long: seconds waited behind them."""
        before = self.waited_s
        for _ in range(chunks):
            if not reads.armed:
                reads.arm()
        self.now += busy_s
        await asyncio.sleep(0)
        return self.waited_s - before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(coalescing, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    return clock


async def test_behind_a_first_chunk_nothing_waits_and_then_the_rest_of_the_time(clock: Clock) -> None:
    reads = ReadCoalescing(0.001)
    assert await clock.turn(reads) == 0.0
    assert await clock.turn(reads, busy_s=0.0002) == pytest.approx(0.0008)
    assert await clock.turn(reads, busy_s=0.0004) == pytest.approx(0.0006)
    clock.now += 0.02
    assert await clock.turn(reads) == 0.0


async def test_a_loop_that_is_busy_for_longer_does_not_wait(clock: Clock) -> None:
    reads = ReadCoalescing(0.001)
    for _ in range(10):
        assert await clock.turn(reads, busy_s=0.00095) == 0.0


async def test_nothing_waits_while_a_request_is_under_way(clock: Clock) -> None:
    reads = ReadCoalescing(0.001)
    await clock.turn(reads)
    reads.hold_off()
    for _ in range(10):
        assert await clock.turn(reads, busy_s=0.0002) == 0.0
    clock.now += 0.01
    await clock.turn(reads)
    assert await clock.turn(reads, busy_s=0.0002) == pytest.approx(0.0008)


async def test_a_turn_as_long_as_the_wait_before_it_may_be_does_not_use_that_up(clock: Clock) -> None:
    reads = ReadCoalescing(0.02)
    await clock.turn(reads)
    reads.hold_off()  # a request comes together with many chunks
    assert await clock.turn(reads, busy_s=0.015) == 0.0
    for _ in range(5):
        assert await clock.turn(reads, busy_s=0.0002) == 0.0


async def test_control_it_can_be_turned_off(clock: Clock) -> None:
    reads = ReadCoalescing(0.0)
    for _ in range(10):
        assert await clock.turn(reads, busy_s=0.0001) == 0.0
    assert clock.waited_s == 0.0
