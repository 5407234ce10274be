"""When a reader who follows a plan reads its next token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

__all__ = ["pace"]

Segment = tuple[float, float]


def pace(
    segments: Sequence[Segment],
    *,
    pause: Callable[[float], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Yields at each moment a token is due; `pause(seconds)` is called for a pause, and has to last as long.

    A reader that comes late for a token, because it had to wait for it, reads on from then.
    """
    segment_end = clock()
    for seconds, rate in segments:
        segment_end += seconds
        if rate == 0:
            pause(segment_end - clock())
            continue
        due = clock()
        while (due := max(due + 1 / rate, clock())) < segment_end:
            sleep(max(due - clock(), 0.0))
            yield
        sleep(max(segment_end - clock(), 0.0))
