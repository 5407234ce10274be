"""One answer as its reader takes it, and when that is worth a report. No I/O, no clock of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tokenflow_client._reader import TokenFlowReader

__all__ = ["HEARTBEAT_S", "INTERVAL_S", "PAUSED_HEARTBEAT_S", "READ_ON_S", "Report", "Track"]

INTERVAL_S = 0.2
"""Reports of a position are at least so far apart; a pause, its end and the end of the answer do not wait."""
AT_ONCE_S = 0.06
"""What does not wait is still so far apart: the gateway refuses more than 20 reports a second."""
HEARTBEAT_S = 1.5
PAUSED_HEARTBEAT_S = 5.0
"""The gateway takes a pause as over after 15 s without a report."""
READ_ON_S = 60.0
"""How long after the answer its reader is followed. The gateway takes reports for five minutes."""
STILL_S = 0.4
STILL_FACTOR = 4.0
"""An application that keeps one event for so many times its usual, and `STILL_S` at least, has paused."""
_SMOOTHING = 0.25


@dataclass(frozen=True, slots=True)
class Report:
    """What was true at `at_s`, by the reporter's clock. `tokens` or `chars` is the position."""

    seq: int
    at_s: float
    tokens: int | None
    chars: int | None
    rate: float | None
    paused: bool

    def wire(self, *, now_s: float) -> dict[str, object]:
        """As `POST /v1/streams/{id}/progress` takes it."""
        body: dict[str, object] = {"seq": self.seq, "age_ms": round(1000 * (now_s - self.at_s), 1)}
        body.update({"tokens": self.tokens} if self.tokens is not None else {"chars": self.chars})
        if self.rate is not None:
            body["rate"] = self.rate
        body["paused"] = self.paused
        return body


class Track:
    """Written by the thread that reads the stream, looked at by the reporter's thread.

    `hand_over` and `asked` are the hot path: a few assignments an event, no lock and no allocation.
    """

    __slots__ = (
        "_clock", "_held_since_s", "_over_at_s", "_said", "_seq", "_shown", "_usual_s", "_wake",
        "capability", "ended", "handed_over", "handed_over_chars", "not_before_s", "read", "reader", "url",
    )  # fmt: skip

    def __init__(
        self,
        *,
        url: str,
        capability: str,
        reader: TokenFlowReader,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.url = url
        self.capability = capability
        self.reader = reader
        self.handed_over = 0
        """Content events given to the application, the one it is busy with included."""
        self.handed_over_chars = 0
        """Code points in them, as far as they were counted."""
        self.read = 0
        """Content events after which the application has asked for more."""
        self.ended = False
        """There will be nothing to report beyond what is known now."""
        self.not_before_s = -math.inf
        self._clock = clock
        self._wake = wake
        self._held_since_s: float | None = None
        self._usual_s = 0.0
        self._seq = 0
        self._said: Report | None = None
        self._over_at_s: float | None = None
        self._shown = reader.begin(wake)

    # ---- the stream's side ----

    @property
    def wants_chars(self) -> bool:
        """Whether the reader may count code points, so that those handed over have to be counted too."""
        return self.reader.evidence == "shown"

    @property
    def is_over(self) -> bool:
        """Whether all of the answer that will come has been handed over."""
        return self._over_at_s is not None

    def hand_over(self, *, content: bool, chars: int = 0) -> None:
        """The application gets an event now."""
        self.handed_over += content
        self.handed_over_chars += chars
        self._held_since_s = self._clock()

    def asked(self) -> None:
        """The application asks for more: it is done with what it has."""
        held_since_s, self._held_since_s = self._held_since_s, None
        if self.handed_over != self.read and held_since_s is not None:
            held_s = min(self._clock() - held_since_s, self._still_s())
            self._usual_s += _SMOOTHING * (held_s - self._usual_s)
            self.read = self.handed_over
        if self._said is not None and self._said.paused:
            self._wake()

    def over(self) -> None:
        """No more of the answer will come. What is shown of it may take longer. May be repeated."""
        if self.reader.evidence != "shown":
            self.end()
        elif self._over_at_s is None:
            self._over_at_s = self._clock()
            self._wake()

    def end(self) -> None:
        """Nobody wants the rest, or nothing more is to be reported. May be repeated."""
        if not self.ended:
            self.ended = True
            self._wake()

    # ---- the reporter's side ----

    def settle(self, now_s: float) -> None:
        """End if the reader is gone or, after the answer, once all is shown or it has taken too long."""
        over_at_s = self._over_at_s
        took_too_long = over_at_s is not None and now_s - over_at_s >= READ_ON_S
        if self._shown.closed or took_too_long or (over_at_s is not None and self._all_is_shown()):
            self.ended = True

    def due(self, now_s: float) -> bool:
        """Whether the gateway would be wrong, by a token or about a pause, without a report."""
        said = self._said
        if now_s < self.not_before_s and not self.ended:
            return False
        if said is None:
            return True
        if self.ended:
            return not self._stands(said)
        if self.is_over and not self._paused(now_s) and not said.paused and self._stands(said):
            return False  # a reader who left without a word must not look like one who is slow
        since_s = now_s - said.at_s
        if self._paused(now_s) != said.paused or self.reader.rate != said.rate:
            return since_s >= AT_ONCE_S
        heartbeat_s = PAUSED_HEARTBEAT_S if said.paused else HEARTBEAT_S
        return since_s >= heartbeat_s or (since_s >= INTERVAL_S and self._is_off(said, since_s))

    def report(self, now_s: float) -> Report:
        """What is true now."""
        self._seq += 1
        tokens, chars = self._position()
        return Report(self._seq, now_s, tokens, chars, self.reader.rate, self._paused(now_s))

    def reported(self, report: Report) -> None:
        """The gateway has it."""
        self._said = report

    # ---- what is known ----

    def _position(self) -> tuple[int | None, int | None]:
        if self.reader.evidence == "pull":
            return self.read, None
        if self._shown.chars and not self._shown.tokens:
            return None, self._shown.chars
        return self._shown.tokens, None

    def _stands(self, said: Report) -> bool:
        return self._position() == (said.tokens, said.chars)

    def _all_is_shown(self) -> bool:
        tokens, chars = self._position()
        if tokens is None:
            return chars is not None and chars >= self.handed_over_chars
        return tokens >= self.handed_over

    def _paused(self, now_s: float) -> bool:
        if self.reader.is_paused:
            return True
        held_since_s = self._held_since_s
        if self.reader.evidence != "pull" or held_since_s is None or self.ended:
            return False
        return now_s - held_since_s > self._still_s()

    def _still_s(self) -> float:
        return max(STILL_S, STILL_FACTOR * self._usual_s)

    def _is_off(self, said: Report, since_s: float) -> bool:
        """Whether what was said, as the gateway carries it on, is off by a token or more.

        It carries it on at the declared rate; at which one without, is not ours to know, so that a reader who
        stands still in front of unread text is worth a report as well.
        """
        tokens, _ = self._position()
        if said.paused:
            return not self._stands(said)
        if tokens is None or said.tokens is None:
            return True
        if said.rate is None:
            return tokens != said.tokens or self.handed_over > tokens
        expected = said.tokens + said.rate * since_s
        if self._held_since_s is None or self.reader.evidence == "shown":
            expected = min(expected, max(self.handed_over, said.tokens))
        return abs(tokens - expected) >= 1.0
