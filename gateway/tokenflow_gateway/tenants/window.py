"""What was used within the last minute: a sliding window that never lets more through than its limit.

Amounts are kept in slots of half a second. A slot counts until its youngest moment is a minute old, so that
no minute, wherever it begins, has more than the limit. What a steady load loses by that is at most a slot in
a minute (0.8 %). `store/limits.lua` keeps the same slots for a fleet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

__all__ = ["SLOTS", "SLOT_S", "SlidingWindow", "leaves_in_s", "slot_of"]

SLOT_S = 0.5
SLOTS = 121
"""Slots that may hold something of the last minute: 120, and the one that is half over."""


def slot_of(now: float) -> int:
    """The slot of a time in seconds."""
    return math.floor(now / SLOT_S)


def leaves_in_s(slot: int, now: float) -> float:
    """Seconds until what is in `slot` counts no more."""
    return max(0.0, (slot + SLOTS) * SLOT_S - now)


class SlidingWindow:
    """Amounts used of one limit. Times are seconds of one clock that does not run backwards."""

    __slots__ = ("_slots", "_total")

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # in the order of time
        self._total = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Slots and what is in them, oldest first."""
        return iter(self._slots.items())

    def used(self, now: float) -> int:
        """What counts at this moment."""
        oldest = slot_of(now) - SLOTS + 1
        while self._slots and (slot := next(iter(self._slots))) < oldest:
            self._total -= self._slots.pop(slot)
        return self._total

    def add(self, amount: int, now: float) -> int:
        """Use so much more. Returns the slot, for `change`."""
        slot = slot_of(now)
        if self._slots:
            slot = max(slot, next(reversed(self._slots)))  # a clock that was set back
        self._slots[slot] = self._slots.get(slot, 0) + amount
        self._total += amount
        return slot

    def change(self, slot: int, amount: int, now: float) -> None:
        """It has become so much more, or less, than was added: less in its slot, more from now on."""
        if amount > 0:
            self.add(amount, now)
        elif slot in self._slots:
            amount = -min(-amount, self._slots[slot])
            self._slots[slot] += amount
            self._total += amount

    def room_in_s(self, amount: int, limit: int, now: float) -> float:
        """Seconds until `amount` more is within `limit`, if nothing else comes; infinite if it never is."""
        if amount > limit:
            return math.inf
        excess = self.used(now) + amount - limit
        if excess <= 0:
            return 0.0
        for slot, held in self._slots.items():
            excess -= held
            if excess <= 0:
                return leaves_in_s(slot, now)
        raise AssertionError("what is too much is in the slots")

    def empty_in_s(self, now: float) -> float:
        """Seconds until nothing counts any more, if nothing else comes."""
        self.used(now)
        return leaves_in_s(next(reversed(self._slots)), now) if self._slots else 0.0
