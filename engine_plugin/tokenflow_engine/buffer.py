"""The virtual buffer: how many generated tokens one reader has not read yet.

One formula on both sides of the link. The engine keeps a buffer per stream from what it generates and from
the gateway's reports; the gateway keeps a copy of what the engine must believe, and reports only when reality
departs from it.
"""

from __future__ import annotations

from tokenflow_engine.protocol import Reading

__all__ = ["DEFAULT_RATE", "VirtualBuffer"]

DEFAULT_RATE = 5.3
"""Tokens per second of a reader of whom nothing is known: 238 English words a minute (Brysbaert 2019)."""
_OLDEST_S = 10.0
"""No report is under way for longer: what claims to be older is of a clock that was set."""


class VirtualBuffer:
    """``buffered = generated - consumed`` (TokenFlow, EuroSys '26: virtual buffer counter), in tokens.

    Between reports the reader moves at `rate` tokens per second while there is something to read:
    ``consumed(t) = min(generated(t), consumed(t0) + rate * (t - t0))``, and stands still while paused.
    Times are seconds of one clock; a time that lies in the past changes nothing.
    """

    __slots__ = ("_at", "_reported_at", "_seq", "consumed", "generated", "paused", "rate")

    def __init__(self, *, rate: float, now: float) -> None:
        self.rate = rate
        self.generated = 0
        self.consumed = 0.0
        """At the time of the last change; `consumed_at` looks ahead."""
        self.paused = False
        self._at = now
        self._seq = 0
        self._reported_at = float("-inf")

    def consumed_at(self, now: float) -> float:
        """Tokens read by `now`, without changing anything."""
        if self.paused or now <= self._at:
            return self.consumed
        return min(float(self.generated), self.consumed + self.rate * (now - self._at))

    def buffered_at(self, now: float) -> float:
        """Tokens generated and not read by `now`; never negative."""
        return self.generated - self.consumed_at(now)

    def generate(self, total: int, *, now: float) -> None:
        """`total` tokens have been generated so far; the count never falls."""
        self._advance(now)
        self.generated = max(self.generated, total)

    def report(self, reading: Reading, *, now: float) -> bool:
        """Take over what the gateway says. False if a later report has come already: this one is ignored.

        A position beyond what was generated is everything generated. The reader has moved on between
        `reading.at` and `now` by the same formula; a time in the future, or long ago, is taken as `now`.
        """
        if reading.seq < self._seq if reading.seq else reading.at < self._reported_at:
            return False
        self._seq, self._reported_at = reading.seq, reading.at
        self.rate, self.paused = reading.rate, reading.paused
        self.consumed = min(max(reading.consumed, 0.0), float(self.generated))
        self._at = reading.at if now - _OLDEST_S <= reading.at <= now else now
        self._advance(now)
        return True

    def forget_reader(self, *, rate: float, now: float) -> None:
        """Nobody reports any more: go on unpaused at `rate`, as for a stream without a gateway."""
        self._advance(now)
        self.rate, self.paused = rate, False

    def _advance(self, now: float) -> None:
        self.consumed = self.consumed_at(now)
        self._at = max(self._at, now)
