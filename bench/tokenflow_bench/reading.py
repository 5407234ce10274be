"""What one person has read of an answer whose tokens come over time, and when there was nothing to read.

Reading a token takes 1 / rate seconds from the moment both it and the reader are there; it counts as read at
the end of that. The reader begins at the first token. With W(t) the tokens that a reader who never lacks text
has read t seconds after the first one (piecewise linear: pauses are flat, scans steep), token j (from 0) that
came at c_j has been read at W^-1(max over k <= j of (W(c_k) - k) + j + 1); W^-1 takes the earliest time.

This is the only home of that rule. `Reading` runs along with a live stream, `read_times` takes a whole answer
at once, and a simulator that lets `rate * factor * dt` tokens be read where there are some crosses j + 1 at
exactly the time that these name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Person", "Reading", "Span", "pause_spans", "read_times", "waits"]

Floats = NDArray[np.float64]
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
        return cls(rate, pause_spans(pauses))

    def pauses(self) -> list[Span]:
        """Begin and end of each, seconds after the first token."""
        found: list[Span] = []
        at = 0.0
        for seconds, factor in self.spans:
            if factor == 0:
                found.append((at, at + seconds))
            at += seconds
        return found

    def changes(self) -> Iterator[tuple[float, float]]:
        """Seconds after the first token, and the factor from then on; without spans none, so always 1."""
        at = 0.0
        for seconds, factor in self.spans:
            yield at, factor
            at += seconds
        if self.spans:
            yield at, 1.0


def pause_spans(pauses: Sequence[Span]) -> tuple[Span, ...]:
    """Spans of a reader who only pauses, from begins and ends in seconds after the first token."""
    spans: list[Span] = []
    at = 0.0
    for begin, end in pauses:
        spans += [(begin - at, 1.0), (end - begin, 0.0)]
        at = end
    return tuple(spans)


def read_times(person: Person, token_s: ArrayLike) -> Floats:
    """When each token has been read. `token_s` are the times at which they came, which do not decrease."""
    came = np.asarray(token_s, dtype=np.float64)
    if person.is_machine or not len(came):
        return came.copy()
    first = came[0]
    number: Floats = np.arange(len(came), dtype=np.float64)
    progress = _Progress(person)
    begun: Floats = np.maximum.accumulate(progress.read_by(came - first) - number)
    read_s: Floats = first + progress.when(begun + number + 1)
    return read_s


def waits(person: Person, token_s: ArrayLike, read_s: Floats, *, until_s: float | None = None) -> list[Span]:
    """Begin and end of each wait on an empty buffer after the first token, pauses taken out.

    `until_s`: the answer had not come to its end by then, so the last wait goes on until then. None for a
    machine: it has no pace to fall behind.
    """
    came = np.asarray(token_s, dtype=np.float64)
    if person.is_machine or not len(came):
        return []
    empty = np.flatnonzero(came[1:] > read_s[:-1])
    gaps = list(zip(read_s[empty].tolist(), came[empty + 1].tolist(), strict=True))
    if until_s is not None and read_s[-1] < until_s:
        gaps.append((float(read_s[-1]), until_s))
    pauses = [(came[0] + begin, came[0] + end) for begin, end in person.pauses()]
    return [part for gap in gaps for part in _without(gap, pauses)] if pauses else gaps


class Reading:
    """One person and one answer, token by token as they come, at a constant cost each."""

    __slots__ = ("_person", "_read", "_span", "_span_at", "read_s")

    def __init__(self, person: Person) -> None:
        self._person = person
        self._span = 0
        self._span_at = 0.0
        """When the current span began."""
        self._read = 0
        self.read_s: list[float] = []
        """When each token that has come is read: may lie ahead."""

    def arrived(self, at: float) -> None:
        """One more token has come, no earlier than the one before."""
        if not self.read_s:
            self._span_at = at
            begin = at
        else:
            begin = max(self.read_s[-1], at)
        self.read_s.append(self._read_from(begin))

    def read_by(self, at: float) -> int:
        """Tokens read by `at`, which does not decrease from call to call."""
        while self._read < len(self.read_s) and self.read_s[self._read] <= at:
            self._read += 1
        return self._read

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


class _Progress:
    """W and its inverse for one person."""

    def __init__(self, person: Person) -> None:
        seconds, factors = np.array(person.spans, dtype=np.float64).reshape(-1, 2).T
        self._rate = person.rate
        self._speeds = np.append(factors * person.rate, person.rate)
        self._ends = np.concatenate([[0.0], np.cumsum(seconds)])
        self._read = np.concatenate([[0.0], np.cumsum(seconds * self._speeds[:-1])])
        """At each end."""

    def read_by(self, at: Floats) -> Floats:
        """W: tokens read by so many seconds after the first one came."""
        if len(self._ends) == 1:
            return at * self._rate
        span = np.searchsorted(self._ends, at, side="right") - 1
        read: Floats = self._read[span] + (at - self._ends[span]) * self._speeds[span]
        return read

    def when(self, tokens: Floats) -> Floats:
        """W^-1, the earliest time; of positive numbers of tokens."""
        if len(self._ends) == 1:
            return tokens / self._rate
        span = np.searchsorted(self._read, tokens, side="left") - 1
        when: Floats = self._ends[span] + (tokens - self._read[span]) / self._speeds[span]
        return when


def _without(gap: Span, pauses: Sequence[Span]) -> Iterator[Span]:
    """The parts of a gap outside the pauses, which are in order."""
    at, end = gap
    for begin, stop in pauses:
        if stop <= at:
            continue
        if begin >= end:
            break
        if begin > at:
            yield at, begin
        at = stop
    if at < end:
        yield at, end
