"""What one person has read of an answer whose tokens come over time, and when there was nothing to read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Person", "Reading"]

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Person:
    """Reads `rate` tokens per second times the factor of the moment; a machine, at `math.inf`, takes all.

    `spans` are (seconds, factor), one after the other from the first token on. The factor is 0 in a pause,
    and 1 after the last span.
    """

    rate: float
    spans: tuple[Span, ...] = ()

    @property
    def is_machine(self) -> bool:
        """Nobody waits at each of its tokens."""
        return math.isinf(self.rate)

    @classmethod
    def with_pauses(cls, rate: float, pauses: Sequence[Span]) -> Person:
        """Pauses as beginnings and ends, seconds after the first token, in order."""
        spans: list[Span] = []
        at = 0.0
        for begin, end in pauses:
            spans += [(begin - at, 1.0), (end - begin, 0.0)]
            at = end
        return cls(rate, tuple(spans))

    def pauses(self) -> list[Span]:
        """Begin and end of each, seconds after the first token."""
        found: list[Span] = []
        at = 0.0
        for seconds, factor in self.spans:
            if factor == 0:
                found.append((at, at + seconds))
            at += seconds
        return found


class Reading:
    """One person and one answer.

    Reading a token takes 1/rate seconds from the moment both it and the reader are there; the token counts
    as read at the end of that. The person begins at the first token. What comes later does not change when an
    earlier token is read, so this runs along with a stream at a constant cost a token.
    """

    __slots__ = ("_person", "_read", "_span", "_span_at", "read_s", "stalls")

    def __init__(self, person: Person) -> None:
        self._person = person
        self._span = 0
        self._span_at = 0.0
        """When the current span began."""
        self._read = 0
        self.read_s: list[float] = []
        """When each token that has come is read: may lie ahead."""
        self.stalls: list[Span] = []
        """Begin and end of each wait on an empty buffer after the first token, pauses taken out."""

    @classmethod
    def of(cls, person: Person, token_s: Sequence[float]) -> Reading:
        """The whole of an answer whose tokens came at these times, which do not decrease."""
        reading = cls(person)
        for at in token_s:
            reading.arrived(at)
        return reading

    def arrived(self, at: float) -> None:
        """One more token has come, no earlier than the one before."""
        begin = at
        if not self.read_s:
            self._span_at = at
        elif self.read_s[-1] < at:
            self.stalls += self.waiting(self.read_s[-1], at)
        else:
            begin = self.read_s[-1]
        self.read_s.append(self._read_from(begin))

    def read_by(self, at: float) -> int:
        """Tokens read by `at`, which does not decrease from call to call."""
        while self._read < len(self.read_s) and self.read_s[self._read] <= at:
            self._read += 1
        return self._read

    def waiting(self, begin: float, end: float) -> list[Span]:
        """The parts of a time without text, after all that came has been read, in which they would read.

        None for a machine: it has no pace to fall behind.
        """
        if self._person.is_machine:
            return []
        spans = self._person.spans
        parts: list[Span] = []
        at = begin
        span, span_at = self._span, self._span_at
        while span < len(spans) and span_at < end:
            span_end = span_at + spans[span][0]
            if spans[span][1] == 0:
                if span_at > at:
                    parts.append((at, span_at))
                at = max(at, span_end)
            span, span_at = span + 1, span_end
        if at < end:
            parts.append((at, end))
        return parts

    def _read_from(self, at: float) -> float:
        """The end of one token's reading that begins at `at`; moves on to the span in which it ends."""
        spans, rate = self._person.spans, self._person.rate
        if math.isinf(rate):
            return at
        tokens = 1.0
        while self._span < len(spans):
            seconds, factor = spans[self._span]
            end, speed = self._span_at + seconds, rate * factor
            if at < end:
                if speed > 0 and at + tokens / speed <= end:
                    return at + tokens / speed
                tokens -= (end - at) * speed
                at = end
            self._span, self._span_at = self._span + 1, end
        return at + tokens / rate
