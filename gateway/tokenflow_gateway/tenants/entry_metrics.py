"""Metrics of the queue before the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tokenflow_gateway.sums import Histograms, Sums
from tokenflow_gateway.tenants.admission import AdmissionOutcome

__all__ = ["QueueMetrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class QueueMetrics:
    """Written when a request leaves the queue, or need not enter it; its length is read when scraped."""

    def __init__(self, registry: CollectorRegistry, sums: Sums) -> None:
        """`sums` are the registry's."""
        outcomes = Counter(
            "tokenflow_queue_left",
            "Requests by what became of them before the engines: at_once, waited, full, timeout, left.",
            ["sla", "outcome"],
            registry=registry,
        )
        waits = Histograms(
            "tokenflow_queue_seconds",
            "Time that requests have waited for an engine with room, those that need not wait included.",
            ["sla"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._outcomes = cache(lambda *of: sums.of(outcomes.labels(*of)))
        self._waits = waits

    def watch(self, registry: CollectorRegistry, waiting: Callable[[], Mapping[str, int]]) -> None:
        """Export how many wait from now on."""
        registry.register(_Waiting(waiting))

    def count(self, sla: str, outcome: AdmissionOutcome, waited_s: float) -> None:
        self._outcomes(sla, outcome).amount += 1
        if outcome != "full":
            self._waits.labels(sla).add(waited_s)


class _Waiting(Collector):
    def __init__(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        self._waiting = waiting

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "tokenflow_queue_streams", "Requests that wait for an engine with room.", labels=["sla"]
        )
        for sla, count in self._waiting().items():
            family.add_metric([sla], count)
        yield family
