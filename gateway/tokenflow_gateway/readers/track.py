"""One stream's reader: the estimator, and what turns events and reports into its evidence."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable

from tokenflow_engine.protocol import Reader
from tokenflow_gateway.readers.estimator import Estimate, Estimator
from tokenflow_gateway.readers.progress import ProgressReport
from tokenflow_gateway.readers.speed import TextShape, declared_pace, model_pace

__all__ = ["REQUESTS_PER_S", "ReaderTrack", "TooManyReports"]

REQUESTS_PER_S = 20
"""Requests with reports that one stream may send in a second."""
_FIRST_LOOK_TOKENS = 16


class TooManyReports(Exception):
    """More than `REQUESTS_PER_S`; nothing of the request was taken."""


class ReaderTrack:
    """Fed by the relay with content, by the progress route with reports. Times are monotonic seconds.

    Keeps four bytes a token, so that positions in characters can be told in tokens.
    """

    __slots__ = (
        "_allowance",
        "_chars_until",
        "_estimator",
        "_hidden_tokens",
        "_last_seq",
        "_look_again_tokens",
        "_refilled_at",
        "declared_rate",
        "reader",
        "reported",
        "shape",
    )

    def __init__(self, *, reader: Reader, declared_rate: float | None, now: float) -> None:
        self.reader = reader
        self.declared_rate = declared_rate
        self.shape = TextShape()
        pace = declared_pace(declared_rate) if declared_rate else model_pace(self.shape, reader=reader)
        self._estimator = Estimator(pace, reader=reader, now=now)
        self._chars_until = array("L")
        self._hidden_tokens = 0
        self._last_seq = -1
        self._look_again_tokens = _FIRST_LOOK_TOKENS
        self.reported = 0.0
        """Position of the last report, in readable tokens."""
        self._allowance = float(REQUESTS_PER_S)
        self._refilled_at = now

    def content(self, text: str) -> None:
        """One event with text for the reader is on its way to the client."""
        self.shape.add(text)
        self._chars_until.append(self.shape.chars)

    def hidden(self) -> None:
        """One event with tokens that nobody reads: reasoning, tool calls."""
        self._hidden_tokens += 1

    def delivered(self, now: float) -> None:
        """Everything so far has been handed to the client."""
        self._estimator.deliver(self.shape.tokens, now=now)
        if self.declared_rate is None and self.shape.tokens >= self._look_again_tokens:
            self._look_again_tokens *= 2
            self._estimator.set_pace(model_pace(self.shape, reader=self.reader), now=now)

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

    def progress(self, reports: Iterable[ProgressReport], now: float) -> int:
        """Take in reports ordered by `seq`; returns how many were new."""
        accepted = 0
        for report in reports:
            if report.seq <= self._last_seq:
                continue
            self._last_seq = report.seq
            accepted += 1
            position = self._position(report)
            if position is not None:
                self.reported = position = min(position, float(self.shape.tokens))
            self._estimator.report(
                at=now - report.age_ms / 1000,
                position=position,
                rate=report.rate,
                paused=report.paused or not report.visible,
                now=now,
            )
        return accepted

    def _position(self, report: ProgressReport) -> float | None:
        if report.tokens is not None or report.chars is None:
            return report.tokens
        whole = bisect_right(self._chars_until, report.chars)
        if whole == len(self._chars_until):
            return float(whole)
        before = self._chars_until[whole - 1] if whole else 0
        return whole + (report.chars - before) / (self._chars_until[whole] - before)
