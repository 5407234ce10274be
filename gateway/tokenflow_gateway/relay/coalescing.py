"""Chunks of many streams passed on together, while they follow each other faster than anybody can tell.

Network cards call it interrupt coalescing. A process that wakes for each chunk pays for waking, and finds
little of what it needs in the CPU's caches; one that wakes a thousand times a second pays for that once for
all that have come.
"""

from __future__ import annotations

import asyncio
import time

__all__ = ["ReadCoalescing"]

_LEAST_S = 0.0001
"""Not worth a wait."""
_HELD_OFF_S = 0.002
"""Beyond the turn in which a request comes or is sent, or an answer begins: its task needs some more."""


class ReadCoalescing:
    """Has one event loop look for what is ready no more than once in `every_s`, while chunks go by.

    The chunk that comes first goes by at once, and what is ready after it waits until `every_s` have passed
    since the loop began on the ones before. A loop that takes longer than that for them does not wait at
    all, so nothing is lost where the core is busy. Where a request comes or is under way to its engine, or an
    answer begins, nothing waits: its task would do so in each turn of the loop that it needs.
    """

    __slots__ = ("_every_s", "_free_until", "_last", "armed")

    def __init__(self, every_s: float) -> None:
        """0: never wait."""
        self._every_s = every_s
        self._last = 0.0
        self._free_until = 0.0
        self.armed = every_s <= 0.0
        """The wait is arranged, or there is none to be."""

    def arm(self) -> None:
        """A chunk has gone by in this turn of the loop."""
        self.armed = True
        asyncio.get_running_loop().call_soon(self._wait)

    def hold_off(self) -> None:
        """Something else is under way."""
        self._free_until = time.monotonic() + self._every_s + _HELD_OFF_S

    def _wait(self) -> None:
        """At the end of the turn, before the loop looks for what is ready."""
        self.armed = False
        now = time.monotonic()
        left_s = self._last + self._every_s - now
        if left_s > _LEAST_S and now >= self._free_until:
            time.sleep(left_s)
            now = time.monotonic()
        self._last = now
