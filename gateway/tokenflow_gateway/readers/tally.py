"""What a reader has done between two looks: pauses begun, waits for text, tokens read."""

from __future__ import annotations

import msgspec

from tokenflow_gateway.readers.estimator import ReaderState

__all__ = ["Look", "ReaderTally"]


class Look(msgspec.Struct, frozen=True, gc=False):
    """What has come since the last look. `consumed` in the engine's tokens."""

    pauses: int
    stalls: int
    stall_s: float
    consumed: float


class ReaderTally:
    """Compares one look at a reader with the one before. Times are monotonic seconds.

    What begins and ends between two looks is not seen. Where a wait begins or ends between them, half of the
    time in between is taken as waited.
    """

    __slots__ = ("at", "consumed", "stall_s", "stalls", "state")

    def __init__(self, *, now: float) -> None:
        self.at = now
        """The last look."""
        self.state: ReaderState | None = None
        """What was found then; None for a buffer that is empty without a wait."""
        self.consumed = 0.0
        """Tokens read until then, and what was waited for them in all."""
        self.stalls = 0
        self.stall_s = 0.0

    def look(self, state: ReaderState, consumed: float, *, waiting: bool, now: float) -> Look:
        """What is new since the last look.

        `waiting`: an empty buffer means a wait for more; not before the first token of an answer, nor after
        its last.
        """
        before, state_now = self.state, None if state == "stalled" and not waiting else state
        halves = (before == "stalled") + (state_now == "stalled")
        seen = Look(
            pauses=int(state_now == "paused" and before != "paused"),
            stalls=int(state_now == "stalled" and before != "stalled"),
            stall_s=halves * 0.5 * max(0.0, now - self.at),
            consumed=max(0.0, consumed - self.consumed),
        )
        self.state, self.at = state_now, max(self.at, now)
        self.consumed += seen.consumed
        self.stalls += seen.stalls
        self.stall_s += seen.stall_s
        return seen
