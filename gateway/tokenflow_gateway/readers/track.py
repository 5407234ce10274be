"""One stream's reader: the estimator, and what turns events and reports into its evidence."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from tokenflow_engine.protocol import Reader
from tokenflow_gateway.readers.estimator import Estimate, Estimator, Pace
from tokenflow_gateway.readers.leads import Leads
from tokenflow_gateway.readers.learned import LEAST_EVIDENCE_S, Habit
from tokenflow_gateway.readers.progress import ProgressReport
from tokenflow_gateway.readers.speed import TextShape, learned_pace, model_pace
from tokenflow_gateway.readers.tally import ReaderTally

__all__ = ["REQUESTS_PER_S", "ReaderTrack", "TooManyReports", "Watched"]

REQUESTS_PER_S = 20
"""Requests with reports that one stream may send in a second."""
_FIRST_LOOK_TOKENS = 16


class TooManyReports(Exception):
    """More than `REQUESTS_PER_S`; nothing of the request was taken."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A while of reading that evidence has shown: how many times as fast as an average reader of the text."""

    ratio: float
    seconds: float


class ReaderTrack:
    """Fed by the relay with content, by the progress route with reports. Times are monotonic seconds.

    Keeps a few bytes a token, so that positions in characters and in events can be told in tokens.
    """

    __slots__ = (
        "_allowance",
        "_chars_until",
        "_estimator",
        "_events",
        "_habit",
        "_hidden_tokens",
        "_last_seq",
        "_look_again_tokens",
        "_max_rate",
        "_rate_floor",
        "_refilled_at",
        "_taught",
        "_tokens_until",
        "clamped",
        "declared_rate",
        "error_tokens",
        "leads",
        "name",
        "reader",
        "reported",
        "shape",
        "tally",
    )

    def __init__(
        self,
        *,
        reader: Reader,
        declared_rate: float | None,
        rate_floor: float | None = None,
        max_rate: float | None = None,
        name: bytes | None = None,
        habit: Habit | None = None,
        now: float,
    ) -> None:
        """`habit`: what is known of this reader, called `name`, from other streams.

        `rate_floor`: until evidence says more, the reader is taken to read at least so fast; `max_rate`:
        reports may declare no more.
        """
        self.reader = reader
        self.name = name
        self.declared_rate = declared_rate
        self.shape = TextShape()
        self.tally = ReaderTally(now=now)
        self.leads = Leads()
        self._habit = habit
        self._rate_floor = rate_floor
        self._max_rate = max_rate
        self._estimator = Estimator(self._prior(), reader=reader, now=now)
        self._taught = (0.0, 0.0)
        self._chars_until = array("I")
        self._events = 0
        self._tokens_until: array[int] | None = None  # by content event; None while each was one token
        self._hidden_tokens = 0
        self._last_seq = -1
        self._look_again_tokens = _FIRST_LOOK_TOKENS
        self.reported: float | None = None
        """Position said last in what `progress` took in, in readable tokens."""
        self.error_tokens: float | None = None
        """How far the estimate without these reports was off from it, at the time that it was true."""
        self.clamped = 0
        """How many of these reports named a position beyond what was delivered."""
        self._allowance = float(REQUESTS_PER_S)
        self._refilled_at = now

    @property
    def handed_over(self) -> int:
        """Readable tokens that the client has."""
        return self._estimator.delivered

    def content(self, text: str, tokens: int = 1) -> None:
        """One event with text for the reader has come from the engine.

        Without tokens of its own the text belongs to the token before it, or is the first one.
        """
        before = self.shape.chars
        if not tokens and not self._chars_until:
            tokens = 1
        self.shape.add(text, tokens=tokens)
        self._events += 1
        if tokens == 1:
            self._chars_until.append(self.shape.chars)
        elif tokens:
            self._chars_until.extend(before - (-len(text) * n // tokens) for n in range(1, tokens + 1))
        else:
            self._chars_until[-1] = self.shape.chars
        if self._tokens_until is not None:
            self._tokens_until.append(self.shape.tokens)
        elif tokens != 1:
            self._tokens_until = array("I", [*range(1, self._events), self.shape.tokens])

    def contents(self, texts: Sequence[str], tokens: Sequence[int]) -> list[int]:
        """The same for several events; returns how many readable tokens there are with each."""
        shape, text = self.shape, "".join(texts)
        if self._tokens_until is not None or "`" in text or set(tokens) != {1}:
            readable = []
            for one, count in zip(texts, tokens, strict=True):
                self.content(one, count)
                readable.append(shape.tokens)
            return readable
        before = shape.tokens
        chars = accumulate(map(len, texts), initial=shape.chars)
        self._chars_until.extend(islice(chars, 1, None))
        self._events += len(texts)
        shape.add(text, tokens=len(texts))
        return list(range(before + 1, shape.tokens + 1))

    def hidden(self, tokens: int = 1) -> None:
        """An event with tokens that nobody reads has come: reasoning, tool calls."""
        self._hidden_tokens += tokens

    def delivered(self, totals: Sequence[int], times: Sequence[float]) -> None:
        """The client has been handed the first so many readable tokens, at each of these times."""
        self._estimator.deliver(totals, times)
        now = times[-1]
        if self.declared_rate is None and self.shape.tokens >= self._look_again_tokens:
            self._look_again_tokens *= 2
            self._estimator.set_pace(self._prior(), now=now)

    def transport(self, *, at_most: float | None, position: float | None, stalled: bool, now: float) -> None:
        """What the client's connection shows; see `Estimator.transport`."""
        self._estimator.transport(at_most=at_most, position=position, stalled=stalled, now=now)

    def transport_ended(self, now: float) -> None:
        """The connection shows nothing any more."""
        self._estimator.transport_ended(now)

    def estimate(self, now: float) -> Estimate:
        """The reader in readable tokens."""
        return self._estimator.estimate(now)

    def consumed_tokens(self, estimate: Estimate) -> float:
        """The position in the engine's tokens: those that nobody reads count as read."""
        return self._hidden_tokens + estimate.consumed

    def admit_request(self, now: float) -> None:
        """Count one request with reports. Raises `TooManyReports`."""
        refill = (now - self._refilled_at) * REQUESTS_PER_S
        self._allowance = min(float(REQUESTS_PER_S), self._allowance + refill)
        self._refilled_at = now
        if self._allowance < 1.0:
            raise TooManyReports
        self._allowance -= 1.0

    def progress(self, reports: Sequence[ProgressReport], now: float) -> int:
        """Take in reports ordered by `seq`; returns how many were new."""
        accepted, self.clamped = 0, 0
        self.reported = self.error_tokens = None
        believed = [self._estimator.position_at(now - report.age_ms / 1000, now=now) for report in reports]
        for report, before in zip(reports, believed, strict=True):
            if report.seq <= self._last_seq:
                continue
            self._last_seq = report.seq
            accepted += 1
            age_s = report.age_ms / 1000
            position = self._position(report)
            if position is not None:
                self.clamped += self._is_beyond(report, position)
                self.reported = position = min(position, float(self.handed_over))
                self.error_tokens = abs(position - before)
            self._estimator.report(
                at=now - age_s,
                position=position,
                rate=self._granted(report.rate),
                paused=report.paused or (self.reader == "human" and not report.visible),
                now=now,
            )
        return accepted

    def watched(self) -> Watched | None:
        """The reading that evidence has shown since this last answered; None while it is too little."""
        tokens, seconds = self._estimator.watched
        read, passed_s = tokens - self._taught[0], seconds - self._taught[1]
        if self.reader == "machine" or passed_s < LEAST_EVIDENCE_S or read <= 0:
            return None
        self._taught = tokens, seconds
        average = model_pace(self.shape, reader=self.reader).rate
        return Watched(read / passed_s / average, passed_s)

    def _prior(self) -> Pace:
        """The best pace known without evidence of this stream: declared, learned, or the average reader's."""
        if self.declared_rate is not None:
            return Pace.declared(self.declared_rate)
        average = model_pace(self.shape, reader=self.reader)
        pace = average if self._habit is None else learned_pace(average, self._habit)
        if self._rate_floor is None or pace.rate >= self._rate_floor:
            return pace
        return Pace.declared(self._rate_floor)

    def _granted(self, rate: float | None) -> float | None:
        """What a report declares, within what its class may."""
        if rate is None:
            return None
        return max(self._rate_floor or 0.0, rate if self._max_rate is None else min(rate, self._max_rate))

    def _position(self, report: ProgressReport) -> float | None:
        """Clients count content events; a token is a part of one, or several of them."""
        if report.tokens is not None or report.chars is None:
            return report.tokens if self._tokens_until is None else self._tokens_of_events(report.tokens)
        whole = bisect_right(self._chars_until, report.chars)
        if whole == len(self._chars_until):
            return float(whole)
        before = self._chars_until[whole - 1] if whole else 0
        return whole + (report.chars - before) / (self._chars_until[whole] - before)

    def _is_beyond(self, report: ProgressReport, position: float) -> bool:
        """Whether the client says more than it can know of."""
        if report.tokens is not None:
            return report.tokens > self._events or position > self.handed_over
        return position > self.handed_over or (report.chars or 0) > self.shape.chars

    def _tokens_of_events(self, events: float | None) -> float | None:
        if events is None or self._tokens_until is None:
            return events
        if events >= self._events:
            return float(self.shape.tokens)
        whole = int(events)
        before = self._tokens_until[whole - 1] if whole else 0
        return before + (events - whole) * (self._tokens_until[whole] - before)
