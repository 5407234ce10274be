"""Tensor-parallel ranks as threads: what they agree by, and copies of each one's own speed and failures."""

from __future__ import annotations

import random
import threading
from typing import Any

from support.memory_transfer import MemoryTransfer
from tokenflow_engine.kv.transfer.base import Direction, Finished, Ticket

__all__ = ["Reduction", "SlowTransfer"]

_PATIENCE_S = 20.0


class Reduction:
    """`Lowest` between threads. A rank that does not come breaks it for the others."""

    def __init__(self, ranks: int) -> None:
        self.calls = 0
        self._given: list[list[int]] = []
        self._lowest: list[int] = []
        self._barrier = threading.Barrier(ranks, action=self._reduce)
        self._lock = threading.Lock()

    def lowest(self, values: list[int]) -> list[int]:
        with self._lock:
            self._given.append(values)
        self._barrier.wait(_PATIENCE_S)
        result = self._lowest
        self._barrier.wait(_PATIENCE_S)
        return result

    def stop(self) -> None:
        self._barrier.abort()

    def _reduce(self) -> None:
        if not self._given:
            return
        assert len({len(values) for values in self._given}) == 1, "ranks speak of different copies"
        self._lowest = [min(place) for place in zip(*self._given, strict=True)]
        self._given = []
        self.calls += 1


class SlowTransfer(MemoryTransfer):
    """Copies that take as long as the dice say, some of which fail, and some are not even begun."""

    def __init__(self, dice: random.Random, *, slots: int, host_tokens: int) -> None:
        super().__init__(slots=slots, host_tokens=host_tokens)
        self.dice = dice
        self.broken = False
        self._pace = 0.2 + 0.8 * dice.random()

    def let_happen(self) -> None:
        for direction in Direction:
            while self.in_flight(direction) and self.dice.random() < self._pace:
                self.finish(direction, error="no" if self.dice.random() < 0.05 else None)

    def submit(self, *args: Any) -> Ticket:
        if self.dice.random() < 0.02:
            raise RuntimeError("not begun")
        return super().submit(*args)

    def poll(self) -> list[Finished]:
        if self.broken:
            raise RuntimeError("the device is gone")
        seconds = self.dice.random() / 100
        return [Finished(done.ticket, seconds, done.error) for done in super().poll()]
