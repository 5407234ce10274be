"""Slack of live readers as Prometheus sees it: the seconds until each would notice that nothing comes."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from tokenflow_gateway.relay.stream import Stream

__all__ = ["SlackCollector", "slack_s"]

_BOUNDS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, math.inf)


def slack_s(stream: Stream, now: float) -> float | None:
    """Seconds that the unread text will last; infinite for who pauses, None before the first token."""
    stream.settle()
    track = stream.reader
    if stream.first_token is None or not track.handed_over:
        return None
    estimate = track.estimate(now)
    if estimate.state == "paused":
        return math.inf
    unread = track.shape.tokens - estimate.consumed
    return max(0.0, unread / estimate.rate) if estimate.rate > 0 else math.inf


class SlackCollector(Collector):
    """How many readers have at most so much slack, for `histogram_quantile` without `rate`."""

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._streams = streams

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "tokenflow_readers_with_slack",
            "Readers of open streams whose unread text lasts for at most so many seconds (estimate).",
            labels=["le"],
        )
        now, counts = time.monotonic(), [0] * len(_BOUNDS_S)
        for stream in self._streams:
            if stream.end is None and stream.streaming and (slack := slack_s(stream, now)) is not None:
                counts[bisect_left(_BOUNDS_S, slack)] += 1
        for bound, count in zip(_BOUNDS_S, accumulate(counts), strict=True):
            family.add_metric(["+Inf" if bound == math.inf else f"{bound:g}"], count)
        yield family
