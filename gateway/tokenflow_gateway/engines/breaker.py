"""Leaves an engine alone whose requests fail, and tries it again with one of them."""

from __future__ import annotations

from typing import Literal

__all__ = ["Breaker", "BreakerState"]

BreakerState = Literal["closed", "open", "half_open"]

_FAILURES = 3
"""In a row, to open it."""
_FIRST_S, _LONGEST_S = 1.0, 30.0
_TRIAL_S = 30.0
"""A trial of which nothing has been heard for so long is forgotten."""


class Breaker:
    """Of one engine. Closed: requests come. Open: none do, for a second; twice as long after a failed trial.

    Then half open: one request at a time is let through, and its outcome decides. The health probe asks other
    things of an engine than requests do, and may find it well when these fail. Times are of one clock.
    """

    __slots__ = ("_failures", "_open_s", "_trial_at", "_unasked", "_until", "opened")

    def __init__(self) -> None:
        self._failures = 0
        self._open_s = _FIRST_S
        self._until: float | None = None
        self._trial_at: float | None = None
        self._unasked: float | None = None  # the trial, until it goes out
        self.opened = 0
        """How many times it has opened."""

    def state(self, now: float) -> BreakerState:
        if self._until is None:
            return "closed"
        return "open" if now < self._until else "half_open"

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        if self._until is None:
            return True
        if now < self._until:
            return False
        return self._trial_at is None or now - self._trial_at >= _TRIAL_S

    def sent(self, now: float) -> None:
        """A request is sent: while half open, the trial. Sent for want of another engine, it is none."""
        if self._until is not None and self.allows(now):
            self._trial_at = self._unasked = now

    def asked(self) -> float | None:
        """A request goes out to the engine. Returns the trial, if this is it."""
        trial, self._unasked = self._unasked, None
        return trial

    def unheard(self, trial: float | None) -> None:
        """A request has ended before the engine had answered: if it was the `trial`, another one may be."""
        if trial is not None and trial == self._trial_at:
            self._trial_at = None

    def succeeded(self) -> None:
        """The engine has answered, whatever it was."""
        self._failures, self._open_s = 0, _FIRST_S
        self._until = self._trial_at = self._unasked = None

    def failed(self, now: float) -> None:
        """It could not be reached, dropped the connection, or was silent for too long."""
        self._failures += 1
        if self._until is not None:
            if now < self._until:
                return  # one of those that were under way when it opened
            self._open_s = min(2 * self._open_s, _LONGEST_S)
        elif self._failures < _FAILURES:
            return
        self._until, self._trial_at, self._unasked = now + self._open_s, None, None
        self.opened += 1
