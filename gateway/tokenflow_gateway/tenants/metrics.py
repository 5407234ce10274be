"""Metrics by class of service and, for a bounded number of them, by tenant."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tokenflow_gateway.counting import Count, LabelledCounter, LabelledHistogram, Spread
from tokenflow_gateway.relay.stream import Stream

__all__ = ["OTHER", "TenantLabels", "TenantMetrics"]

OTHER: Final = "other"
"""Label of all tenants beyond the bound together."""

_KINDS: Final = ("prompt", "generated", "delivered", "consumed")
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class TenantLabels:
    """Which tenants have a label of their own: the configured ones first, then those that come first.

    A label once given stays: counters must not change their meaning.
    """

    def __init__(self, configured: Iterable[str], *, most: int) -> None:
        self._most = most
        self._named: set[str] = set()
        for name in configured:
            self.of(name)

    def of(self, tenant: str) -> str:
        """The tenant's own name, or `OTHER`."""
        if tenant not in self._named:
            if len(self._named) >= self._most:
                return OTHER
            self._named.add(tenant)
        return tenant


class _OfClass(NamedTuple):
    """The metrics of one class."""

    ttft: Spread
    late: Count
    tokens: tuple[Count, ...]
    """By `_KINDS`."""
    stalls: Count
    stall_s: Count
    parked_s: Count


class TenantMetrics:
    """Written once for each stream, when its counts are final; gauges are read when scraped."""

    def __init__(self, registry: CollectorRegistry, labels: TenantLabels) -> None:
        self._labels = labels

        def counter(name: str, text: str, *labelled: str) -> LabelledCounter:
            return LabelledCounter(f"tokenflow_{name}", text, labelled, registry=registry)

        self._class_ended = counter(
            "class_streams_ended", "Streams by class and by how they ended.", "sla", "reason"
        )
        self._class_ttft = LabelledHistogram(
            "tokenflow_class_time_to_first_token_seconds",
            "Arrival of a streaming request to its first content handed to the client, by class.",
            ["sla"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._class_late = counter(
            "class_first_token_late",
            "Streams whose first token came after their target, or that ended after it without one.",
            "sla",
        )
        self._class_tokens = counter(
            "class_tokens",
            "Tokens of streams by class: prompt, generated, delivered, consumed.",
            "sla",
            "kind",
        )
        self._class_stalls = counter(
            "class_stalls", "Times that readers waited for more text, by class.", "sla"
        )
        self._class_stall_s = counter(
            "class_stall_seconds", "Seconds that readers waited so, by class.", "sla"
        )
        self._class_parked_s = counter(
            "class_parked_seconds", "Seconds that streams were out of the batch for others, by class.", "sla"
        )
        self._tenant_ended = counter(
            "tenant_streams_ended", "Streams by tenant and by how they ended.", "tenant", "reason"
        )
        self._tenant_tokens = counter(
            "tenant_tokens",
            "Tokens of streams by tenant: prompt, generated, delivered, consumed.",
            "tenant",
            "kind",
        )
        self._classes: dict[str, _OfClass] = {}
        self._tenants: dict[str, tuple[Count, ...]] = {}

    def watch(self, registry: CollectorRegistry, streams: Iterable[Stream]) -> None:
        """Export how many streams there are from now on."""
        registry.register(_Streams(streams, self._labels))

    def settled(self, stream: Stream) -> None:
        """A stream is over. One that was tried on another engine counts there."""
        end = stream.end or "failed"
        if end == "retried":
            return
        sla, tenant, now = stream.grant.sla.name, self._labels.of(stream.tenant), time.monotonic()
        self._class_ended.labels(sla, end).inc()
        self._tenant_ended.labels(tenant, end).inc()
        of_class, of_tenant = self._of_class(sla), self._of_tenant(tenant)
        tally, generated = stream.reader.tally, stream.generated
        tokens = (stream.prompt_tokens or 0, generated, stream.delivered, min(tally.consumed, generated))
        for amount, by_class, by_tenant in zip(tokens, of_class.tokens, of_tenant, strict=True):
            by_class.inc(amount)
            by_tenant.inc(amount)
        of_class.stalls.inc(tally.stalls)
        of_class.stall_s.inc(tally.stall_s)
        of_class.parked_s.inc(stream.parked_s(now))
        if stream.streaming and end != "refused":
            _note_first_token(of_class, stream)

    def _of_class(self, sla: str) -> _OfClass:
        found = self._classes.get(sla)
        if found is None:
            found = self._classes[sla] = _OfClass(
                self._class_ttft.labels(sla),
                self._class_late.labels(sla),
                tuple(self._class_tokens.labels(sla, kind) for kind in _KINDS),
                self._class_stalls.labels(sla),
                self._class_stall_s.labels(sla),
                self._class_parked_s.labels(sla),
            )
        return found

    def _of_tenant(self, tenant: str) -> tuple[Count, ...]:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = tuple(self._tenant_tokens.labels(tenant, kind) for kind in _KINDS)
        return found


def _note_first_token(of_class: _OfClass, stream: Stream) -> None:
    if stream.ttft_s is not None:
        of_class.ttft.observe(stream.ttft_s)
    waited_s = stream.ttft_s if stream.ttft_s is not None else (stream.ended or 0.0) - stream.started
    of_class.late.inc(waited_s > stream.grant.ttft_s)


class _Streams(Collector):
    """Open streams by class and state, and by tenant."""

    def __init__(self, streams: Iterable[Stream], labels: TenantLabels) -> None:
        self._streams = streams
        self._labels = labels

    def collect(self) -> Iterator[GaugeMetricFamily]:
        by_class: Tally[tuple[str, str]] = Tally()
        by_tenant: Tally[str] = Tally()
        for stream in self._streams:
            by_class[stream.grant.sla.name, stream.state] += 1
            by_tenant[self._labels.of(stream.tenant)] += 1
        family = GaugeMetricFamily(
            "tokenflow_class_streams",
            "Streams now, by class and what they are doing.",
            labels=["sla", "state"],
        )
        for labels, count in by_class.items():
            family.add_metric(labels, count)
        yield family
        family = GaugeMetricFamily("tokenflow_tenant_streams", "Streams now, by tenant.", labels=["tenant"])
        for tenant, count in by_tenant.items():
            family.add_metric([tenant], count)
        yield family
