"""What a thousand streams cost, and whether those who pause slow the others down. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenflow_bench.spread import percentile

__all__ = ["Gaps", "Usage", "per_event_us", "per_stopped_kib", "per_stream_kib"]

_KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Times between two tokens of a stream, in milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float
    worst_ms: float

    @classmethod
    def of(cls, gaps_s: Sequence[float]) -> Gaps:
        return cls(
            count=len(gaps_s),
            p50_ms=1000 * percentile(gaps_s, 50),
            p99_ms=1000 * percentile(gaps_s, 99),
            worst_ms=1000 * percentile(gaps_s, 100),
        )


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process used of one core, over some time."""

    cpu_s: float
    wall_s: float

    def __add__(self, other: Usage) -> Usage:
        return Usage(cpu_s=self.cpu_s + other.cpu_s, wall_s=self.wall_s + other.wall_s)

    @property
    def share(self) -> float:
        """1 is a core that has nothing left."""
        return self.cpu_s / self.wall_s


def per_event_us(without: Usage, with_events: Usage, *, events: int) -> float:
    """CPU time of one event, in microseconds: what was used beyond the time without them."""
    beyond_s = with_events.cpu_s - without.share * with_events.wall_s
    return 1e6 * beyond_s / events


def per_stream_kib(*, idle_bytes: int, open_bytes: int, streams: int) -> float:
    """Memory of an open stream."""
    return (open_bytes - idle_bytes) / streams / _KIB


def per_stopped_kib(*, reading_kib: float, mixed_kib: float, streams: int, stopped: int) -> float:
    """Memory of a stream whose client has stopped reading, from the mean of a mixture with others.

    `reading_kib` is the mean where all read, `mixed_kib` that of the mixture.
    """
    return reading_kib + (mixed_kib - reading_kib) * streams / stopped
