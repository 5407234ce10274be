"""Where a reader really was: what the harness knows, and the gateway has to find out.

Times are seconds of the machine's monotonic clock, which all its processes share. Positions are tokens:
events with content.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Positions", "Truth", "person_behind"]


class Positions:
    """A count over time: each step (time, count) holds until the next one, and 0 before the first."""

    def __init__(self, steps: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(steps)
        self._times = [at for at, _ in ordered]
        self._counts = [count for _, count in ordered]

    @classmethod
    def of_events(cls, times: Iterable[float]) -> Positions:
        """One more at each of these times."""
        return cls((at, float(number)) for number, at in enumerate(sorted(times), start=1))

    def at(self, time_s: float) -> float:
        index = bisect_right(self._times, time_s)
        return self._counts[index - 1] if index else 0.0


@dataclass(frozen=True, kw_only=True)
class Truth:
    """One answer as it was. `window` is the time in which the gateway is held to it.

    `unread_bytes` are samples (time, bytes) of what lay unread in the reader's own kernel, `bytes_per_token`
    what one token took there, `receive_buffer_bytes` that socket's limit at the end.
    """

    generated: Positions
    consumed: Positions
    window: tuple[float, float]
    pauses: Sequence[tuple[float, float]] = ()
    unread_bytes: Sequence[tuple[float, int]] = ()
    bytes_per_token: float | None = None
    receive_buffer_bytes: int | None = None

    def buffered(self, time_s: float) -> float:
        """Tokens generated and not consumed."""
        return self.generated.at(time_s) - self.consumed.at(time_s)

    @property
    def hidden_bytes(self) -> int:
        """The most that lay unread in the reader's kernel within the window."""
        begin, end = self.window
        return max((unread for at, unread in self.unread_bytes if begin <= at <= end), default=0)


def person_behind(arrivals: Iterable[float], *, rate: float) -> list[float]:
    """When a person at `rate` tokens per second has read each token that came at these times.

    For clients that take everything at once, as browsers and proxies do: the reading leaves no trace in TCP.
    """
    read: list[float] = []
    free_s = 0.0
    for arrival in sorted(arrivals):
        free_s = max(free_s, arrival) + 1 / rate
        read.append(free_s)
    return read
