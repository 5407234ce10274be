"""What is counted for each request, as plain numbers that prometheus_client is told when somebody looks.

Its own counters take a lock and some checks each time: with some twenty of them, a tenth of what a request
takes. For use in one thread, the event loop's, in which metrics are collected, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Histograms", "Sum", "Sums", "Times"]


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


class Times:
    """Seconds by classes of length; `bounds` are their upper ends, rising."""

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds


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
        self._of: dict[tuple[str, ...], Times] = {}
        registry.register(self)

    def labels(self, *values: str) -> Times:
        found = self._of.get(values)
        if found is None:
            found = self._of[values] = Times(self._bounds)
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        for values, times in self._of.items():
            ends = [*map(str, times.bounds), "+Inf"]
            buckets = zip(ends, map(float, accumulate(times.counts)), strict=True)
            family.add_metric(values, list(buckets), sum_value=times.sum_s)
        yield family
