"""Where one reader is: an estimate from all evidence there is, and what it rests on.

Pure: the caller gives the time with every call (seconds of one monotonic clock). Positions are readable
tokens: content events of the answer; reasoning and tool calls take no reading time and are not counted here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import msgspec

from tokenflow_engine.protocol import Reader

__all__ = ["Estimate", "Estimator", "Pace", "ReaderState", "Source"]

ReaderState = Literal["reading", "stalled", "paused", "ahead"]
Source = Literal["progress", "transport", "declared", "learned", "model"]

PAUSE_EXPIRES_S = 15.0
"""A pause without any sign of life is over after this long."""
_SETTLE_S = 0.6
"""Time constant of the rate: 2 s of evidence after a change bring it within 4 % of the new one."""
_LEAST_WAY_S = 0.5
_LOOK_BACK_S = 2.0
_SEEN_SETTLE_S = 2.4
"""A connection shows reading in uneven steps: rates are of the way over so long, or of one longer step."""
_BAND_SIGMAS = 1.28
"""The band spans the central 80 % of a normal distribution."""
_LEAST_RATE, _MOST_RATE = 0.1, 1000.0
_LEAST_SPACING_S = 0.05
"""Reports closer to each other than this show no rate."""
_DECLARED_BAND = (0.9, 1.1)
_SAME_RATE = 0.05
"""Relative: a rate declared again within this is the one declared before."""
_GRAIN_TOKENS = 1.0
_EXPLAINED_S = 10.0
"""Reports count whole tokens: for so long, a way within one token of the rate at hand contradicts no
declaration."""
_Sighting = tuple[float, float]
"""A time, and a position that was seen then."""
_EMPTY_TOKENS = 0.5
"""A reader with less than this before him waits for the next token."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A reading rate in tokens per second with its band, and where it is from."""

    rate: float
    low: float
    high: float
    source: Source

    def __post_init__(self) -> None:
        assert 0 < self.low <= self.rate <= self.high

    @classmethod
    def declared(cls, rate: float) -> Self:
        """The pace that a client has declared."""
        return cls(rate, rate * _DECLARED_BAND[0], rate * _DECLARED_BAND[1], "declared")


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """One reader at one moment. `consumed` in readable tokens, rates in tokens per second."""

    consumed: float
    rate: float
    rate_low: float
    rate_high: float
    state: ReaderState
    source: Source


class Estimator:
    """The position never passes what was delivered and never goes backwards.

    Between two pieces of evidence it moves at the estimated rate while there is something to read. A reader
    of kind ``machine`` takes everything at once, unless reports say otherwise, which rule for
    `PAUSE_EXPIRES_S` after each.
    """

    __slots__ = (
        "_at",
        "_at_most",
        "_counted",
        "_deviation",
        "_furthest",
        "_latest",
        "_learned_s",
        "_pace",
        "_paused_until",
        "_position",
        "_rate",
        "_report",
        "_reported_at",
        "_seen",
        "_shown",
        "_silent",
        "_silent_before",
        "_source",
        "_stall",
        "_watched_s",
        "_watched_tokens",
        "delivered",
        "reader",
    )

    def __init__(self, pace: Pace, *, reader: Reader, now: float) -> None:
        self.reader = reader
        self.delivered = 0
        """Readable tokens handed to the client."""
        self._pace = pace
        self._rate = pace.rate
        self._deviation = 0.0
        self._learned_s = 0.0  # of evidence for this rate
        self._watched_s = 0.0
        self._watched_tokens = 0.0
        self._counted: _Sighting | None = None
        self._furthest = 0.0  # that was counted as watched
        self._latest = now
        self._position = 0.0
        self._shown = 0.0
        self._at = now
        self._paused_until = -math.inf
        self._report: _Sighting | None = None
        self._reported_at = -math.inf
        self._at_most = math.inf
        self._seen: list[_Sighting] = []
        self._stall = False
        self._silent = False
        self._silent_before = False
        self._source: Literal["progress", "transport"] | None = None

    def set_pace(self, pace: Pace, *, now: float) -> None:
        """A better prior has come (more text of the answer). What was declared or taught is kept."""
        if self._pace.source == "declared":
            return
        self._advance(now)
        self._pace = pace
        if self._learned_s == 0.0:
            self._rate = pace.rate

    def deliver(self, totals: Sequence[int], times: Sequence[float]) -> None:
        """So many readable tokens had been handed to the client at each of these times.

        They matter one by one to a reader who has to wait for text, and else the last does.
        """
        if self._position + self._rate * (times[-1] - self._at) < self.delivered:
            totals, times = totals[-1:], times[-1:]
        for total, at in zip(totals, times, strict=True):
            self._advance(at)
            if total > self.delivered:
                self.delivered = total

    def report(
        self, *, at: float, position: float | None, rate: float | None, paused: bool, now: float
    ) -> None:
        """What the client says was true at time `at`. A position beyond what was delivered is all of that.

        `rate` is a declaration: the prior from now on, over which positions teach. Times before the report
        before, or the beginning, are taken as that.
        """
        self._advance(now)
        at = self._latest = min(max(at, self._latest), now)
        if rate is not None:
            self._declare(rate)
        if position is not None:
            position = min(max(position, 0.0), float(self.delivered))
            self._learn(at, position)
            moved_on = 0.0 if paused else self._rate * (now - at)
            self._position = min(float(self.delivered), position + moved_on)
        if paused:
            self._report = self._counted = None  # what is read over a pause says nothing about the rate
        self._paused_until = now + PAUSE_EXPIRES_S if paused else -math.inf
        if paused or position is not None:
            self._reported_at = now
            self._forget_transport()
            self._source = "progress"

    def transport(self, *, at_most: float | None, position: float | None, stalled: bool, now: float) -> None:
        """What the client's connection shows at `now`.

        No more than `at_most` has been read (None: it may be everything). At `position` a client that reads
        at a pace of its own has just been seen, going on. `stalled`: it does not read although there is
        something to read, which is a pause for as long as this is said.

        Ignored for `PAUSE_EXPIRES_S` after each progress report: reports are of the reader, the connection is
        of the program that may read ahead for him.
        """
        self._advance(now)
        if now - self._reported_at < PAUSE_EXPIRES_S:
            return
        self._at_most = math.inf if at_most is None else max(at_most, 0.0)
        self._silent |= stalled
        if position is not None:
            position = min(max(position, 0.0), float(self.delivered), self._at_most)
            self._learn_seen(position, now)
            self._position = position
            self._source = "transport"
        self._stall = stalled

    def transport_ended(self, now: float) -> None:
        """The connection shows nothing any more. What it has taught is kept; a pause is no longer proven."""
        self._advance(now)
        if self._stall:
            self._paused_until = now + PAUSE_EXPIRES_S
        self._forget_transport()

    @property
    def watched(self) -> tuple[float, float]:
        """The reading that positions have shown: tokens, and the seconds they took. Neither ever falls.

        Not more tokens than were delivered, nor seconds than have passed; no pauses, no waits for text.
        """
        return self._watched_tokens, self._watched_s

    def estimate(self, now: float) -> Estimate:
        """The reader at `now`."""
        self._advance(now)
        self._shown = max(self._shown, self._position)
        low, high = self._band()
        return Estimate(self._shown, self._rate, low, high, self._state(now), self._decided_by())

    def position_at(self, at: float, *, now: float) -> float:
        """Where the reader is taken to have been a moment ago, without pauses and waits in between."""
        self._advance(now)
        position = max(self._shown, self._position)
        moves = self._state(now) == "reading"
        return max(0.0, position - self._rate * (now - at)) if moves else position

    def _state(self, now: float) -> ReaderState:
        if self._stall or now < self._paused_until:
            return "paused"
        if self.reader == "machine":
            return "ahead"
        position = max(self._shown, self._position)
        return "stalled" if self.delivered - position < _EMPTY_TOKENS else "reading"

    def _advance(self, now: float) -> None:
        """Move the model to `now`; a pause that expires on the way ends where it expires."""
        at, limit = self._at, self._at_most
        begin = at if at > self._paused_until else self._paused_until
        if limit > self.delivered:
            limit = float(self.delivered)
        if self.reader == "machine" and now - self._reported_at >= PAUSE_EXPIRES_S:
            self._position = limit
        elif now > begin and not self._stall:
            position = self._position + self._rate * (now - begin)
            self._position = position if position < limit else limit
        self._at = at if at > now else now

    def _declare(self, rate: float) -> None:
        """Begin anew with this rate, unless it is the one declared before."""
        rate = min(max(rate, _LEAST_RATE), _MOST_RATE)
        before = self._pace
        if before.source == "declared" and abs(rate - before.rate) <= _SAME_RATE * before.rate:
            return
        self._pace = Pace.declared(rate)
        self._rate, self._deviation, self._learned_s = rate, 0.0, 0.0
        self._report = None

    def _learn(self, at: float, position: float) -> None:
        """Update the rate from the way between two reports, unless the reader had to wait on it."""
        if self._seen:
            self._counted = None
        self._count(at, position)
        before = self._report
        if before is not None:
            if 0 <= at - before[0] < _LEAST_SPACING_S and position >= before[1]:
                return
            if self._pace.source == "declared" and self._is_explained(before, (at, position)):
                return
            self._learn_between(before, (at, position), new_from=before, settle_s=_SETTLE_S)
        self._report = at, position

    def _is_explained(self, earlier: _Sighting, later: _Sighting) -> bool:
        """Whether the rate at hand is good enough for this way, so that a longer one is worth waiting for."""
        passed_s, read = later[0] - earlier[0], later[1] - earlier[1]
        on_the_way = passed_s < _EXPLAINED_S and later[1] <= self.delivered - 1.0
        return on_the_way and abs(read - self._rate * passed_s) <= _GRAIN_TOKENS

    def _count(self, at: float, position: float) -> None:
        """Add the way since the last position to what was watched, if it was new reading."""
        before, self._counted = self._counted, (at, position)
        if position < self._furthest:
            self._counted = None
        elif before is not None:
            passed_s, read = at - before[0], position - before[1]
            if passed_s <= 0 or self._had_to_wait(position, read, passed_s):
                pass
            elif read == 0 and passed_s < PAUSE_EXPIRES_S:
                self._counted = before
            elif read >= _LEAST_RATE * passed_s and passed_s < PAUSE_EXPIRES_S:
                self._watched_s += passed_s
                self._watched_tokens += read
        self._furthest = max(self._furthest, position)

    def _learn_seen(self, position: float, now: float) -> None:
        """Update the rate from where the connection has shown the reader lately.

        Silence is taken for a pause, and what is read over one says nothing about the rate. But silence twice
        in a row is the sign of a reader who has become slower than was expected.
        """
        if self._silent and not self._silent_before:
            self._seen.clear()
        if not self._seen:
            self._counted = None
        self._count(now, position)
        self._silent_before, self._silent = self._silent, False
        while len(self._seen) > 1 and now - self._seen[1][0] >= _LOOK_BACK_S:
            self._seen.pop(0)
        if self._seen and now - self._seen[0][0] >= _LEAST_WAY_S:
            self._learn_between(
                self._seen[0], (now, position), new_from=self._seen[-1], settle_s=_SEEN_SETTLE_S
            )
        self._seen.append((now, position))

    def _learn_between(
        self, earlier: _Sighting, later: _Sighting, *, new_from: _Sighting, settle_s: float
    ) -> None:
        """Update the rate from the way between two positions; that from `new_from` is new evidence."""
        passed_s, read = later[0] - earlier[0], later[1] - earlier[1]
        if passed_s <= 0 or read < 0 or self._had_to_wait(later[1], read, passed_s):
            return
        weight = max(1.0 - math.exp(-passed_s / settle_s), passed_s / (self._learned_s + passed_s))
        step = read / passed_s - self._rate
        self._rate = min(max(self._rate + weight * step, _LEAST_RATE), _MOST_RATE)
        self._deviation = math.sqrt((1 - weight) * (self._deviation**2 + weight * step**2))
        self._learned_s += later[0] - new_from[0]

    def _had_to_wait(self, position: float, read: float, passed_s: float) -> bool:
        return position > self.delivered - 1.0 and read < self._rate * passed_s

    def _forget_transport(self) -> None:
        self._at_most = math.inf
        self._seen.clear()
        self._stall = self._silent = self._silent_before = False

    def _decided_by(self) -> Source:
        held_back = self._stall or (self._position >= self._at_most and self._at_most < self.delivered)
        return "transport" if held_back else self._source or self._pace.source

    def _band(self) -> tuple[float, float]:
        """From the prior's band to the observed one, as evidence comes in."""
        if self._learned_s == 0.0 and self._rate == self._pace.rate:
            pace = self._pace
            return max(min(pace.low, pace.rate), min(_LEAST_RATE, pace.rate)), max(pace.high, pace.rate)
        trust = 1.0 - math.exp(-self._learned_s / (2 * _SETTLE_S))
        prior_low = self._rate * self._pace.low / self._pace.rate
        prior_high = self._rate * self._pace.high / self._pace.rate
        spread = _BAND_SIGMAS * self._deviation
        low = trust * (self._rate - spread) + (1 - trust) * prior_low
        high = trust * (self._rate + spread) + (1 - trust) * prior_high
        return max(min(low, self._rate), min(_LEAST_RATE, self._rate)), max(high, self._rate)
