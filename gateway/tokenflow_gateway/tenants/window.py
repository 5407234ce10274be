"""What was used within the last minute: a sliding window that never lets more through than its limit.

Amounts are kept in slots of half a second. A slot counts until its youngest moment is a minute old, so that
no minute, wherever it begins, has more than the limit. What a steady load loses by that is at most a slot in
a minute (0.8 %).

What turns out to have been used beyond the limit is owed, and counts beside the slots. When something leaves
its slot, as much of the debt takes its place, a minute later: so a debt of ten minutes' worth is paid by ten
minutes. `store/limits.lua` keeps the same slots and debts for a fleet.
"""

from __future__ import annotations

import math

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

    __slots__ = ("_looked_in", "_owed", "_slots", "_total")

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # in the order of time, all within `SLOTS`
        self._total = 0  # in the slots
        self._looked_in = -1  # the slot in which it was last gone over: nothing leaves within one
        self._owed = 0  # while it is not 0, `_total` stays as it is

    def used(self, now: float) -> int:
        """What counts at this moment, debts included."""
        slot = math.floor(now / SLOT_S)
        if slot != self._looked_in:
            self._looked_in = slot
            self._let_go(slot - SLOTS + 1)
        return self._total + self._owed

    def _let_go(self, first: int) -> None:
        """What is in slots before `first` counts no more; debts take its place."""
        if self._owed:
            self._pay_whole_minutes(first)
        while self._slots and (slot := next(iter(self._slots))) < first:
            left = self._slots.pop(slot)
            paid = min(self._owed, left)
            if paid:
                self._slots[slot + SLOTS] = paid
                self._owed -= paid
            self._total += paid - left

    def add(self, amount: int, now: float) -> int:
        """Use so much more. Returns the slot, for `change`."""
        slot = math.floor(now / SLOT_S)
        if slot != self._looked_in:
            self.used(now)
        slots = self._slots
        if slots and (newest := next(reversed(slots))) > slot:  # a clock that was set back
            slot = newest
        slots[slot] = slots.get(slot, 0) + amount
        self._total += amount
        return slot

    def change(self, slot: int, amount: int, limit: int | None, now: float) -> None:
        """It has become so much more, or less, than was added.

        Less is free again in its slot; more is used now, and owed where it is beyond `limit`.
        """
        if amount > 0:
            within = amount if limit is None else max(0, min(amount, limit - self.used(now)))
            self.add(within, now)
            self._owed += amount - within
        elif slot in self._slots:
            amount = min(-amount, self._slots[slot])
            paid = min(self._owed, amount)
            self._owed -= paid
            self._slots[slot] -= amount - paid
            self._total -= amount - paid

    def room_in_s(self, amount: int, limit: int, now: float) -> float:
        """Seconds until `amount` more is within `limit`, if nothing else comes; infinite if it never is."""
        if amount > limit:
            return math.inf
        excess = self.used(now) + amount - limit
        return self._leaves_in_s(excess, now) if excess > 0 else 0.0

    def told(self, now: float) -> tuple[int, float]:
        """What counts, and the seconds until nothing does any more, if nothing else comes."""
        used = self.used(now)
        if self._owed:
            return used, self._leaves_in_s(used, now)
        return used, leaves_in_s(next(reversed(self._slots)), now) if self._slots else 0.0

    # ---- inside ------------------------------------------------------------------------------------

    def _pay_whole_minutes(self, first: int) -> None:
        """Go over those in which nobody looked, and in which all slots left and were taken again."""
        oldest = next(iter(self._slots))
        minutes = min((first - oldest) // SLOTS, self._owed // self._total)
        if minutes > 0:
            self._owed -= minutes * self._total
            self._slots = {slot + minutes * SLOTS: held for slot, held in self._slots.items()}

    def _leaves_in_s(self, amount: int, now: float) -> float:
        """Seconds until so much has left, of what is used now."""
        minutes, before = divmod(amount - 1, self._total)
        for slot, held in self._slots.items():
            before -= held
            if before < 0:
                return leaves_in_s(slot, now) + minutes * SLOTS * SLOT_S
        raise AssertionError("what leaves is in the slots")
