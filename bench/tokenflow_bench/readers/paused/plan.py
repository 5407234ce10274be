"""What is run with a thousand streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["CASES", "ENGINE_RATE", "LOOKS_PER_S", "OPENED_PER_S", "Case", "PausedRun"]

ENGINE_RATE = 5.0
"""Tokens per second of each stream."""
LOOKS_PER_S = 10.0
"""How often the gateway looks at each connection; free while nothing is under way."""
OPENED_PER_S = 125
"""Streams opened in a second, evenly."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """`pauses`: some stop; `costs_reports`: what a report costs is measured at the end."""

    name: str
    module: str = "tokenflow_gateway.cli"
    pauses: bool = False
    costs_reports: bool = False


CASES = (
    Case(name="all_read", costs_reports=True),
    Case(name="some_paused", pauses=True),
    Case(name="unwatched", module="tokenflow_bench.readers.paused.unwatched"),
)


@dataclass(frozen=True, kw_only=True)
class PausedRun:
    """How many streams, of which how many stop reading and how many report a pause; and for how long."""

    streams: int
    stopped: int
    reported: int
    settle_s: float
    window_s: float
    repetitions: int
    say: Callable[[str], None]

    @property
    def pausing(self) -> int:
        return self.stopped + self.reported
