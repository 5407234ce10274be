"""What is counted for each request, as plain numbers that prometheus_client is told when somebody looks.

Its own counters take a lock and some checks each time: for the dozen that a request adds to, 800 of 12,300
bytecodes. For use in one thread, the event loop's, in which metrics are collected, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenflow_engine.control.durations import DurationCounts
from tokenflow_engine.protocol import Durations

__all__ = ["Histograms", "Sum", "Sums", "cumulative"]


class Sum:
    """What is to be added to a counter."""

    __slots__ = ("amount",)

    def __init__(self) -> None:
        self.amount: float = 0


class Sums(Collector):
    """All of a registry. Registered before its counters, it brings them up to date before they tell."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._of: list[tuple[Sum, Counter]] = []
        registry.register(self)

    def of(self, counter: Counter) -> Sum:
        """Of a counter that has its labels."""
        added = Sum()
        self._of.append((added, counter))
        return added

    def collect(self) -> Iterable[Metric]:
        for added, counter in self._of:
            if added.amount:
                counter.inc(added.amount)
                added.amount = 0
        return ()


def cumulative(durations: Durations) -> list[tuple[str, float]]:
    """Prometheus' buckets."""
    ends = [*map(str, durations.bounds_s), "+Inf"]
    return [(end, float(below)) for end, below in zip(ends, accumulate(durations.counts), strict=True)]


class Histograms(Collector):
    """A histogram of seconds for each value of its labels."""

    def __init__(
        self,
        name: str,
        text: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._labelnames = labelnames
        self._bounds = tuple(map(float, buckets))
        self._of: dict[tuple[str, ...], DurationCounts] = {}
        registry.register(self)

    def labels(self, *values: str) -> DurationCounts:
        found = self._of.get(values)
        if found is None:
            found = self._of[values] = DurationCounts(self._bounds)
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        for values, counts in self._of.items():
            durations = counts.message()
            family.add_metric(values, cumulative(durations), sum_value=durations.sum_s)
        yield family
