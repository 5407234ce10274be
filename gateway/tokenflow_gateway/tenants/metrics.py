"""Metrics by class of service and, for a bounded number of them, by tenant."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

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
    """The metrics of one class: to look them up by its label takes longer than to write them."""

    ttft: Histogram
    late: Counter
    tokens: Mapping[str, Counter]
    stalls: Counter
    stall_s: Counter
    parked_s: Counter


class TenantMetrics:
    """Written once for each stream, when its counts are final; gauges are read when scraped."""

    def __init__(self, registry: CollectorRegistry, labels: TenantLabels) -> None:
        self._labels = labels

        def counter(name: str, text: str, *labelled: str) -> Counter:
            return Counter(f"tokenflow_{name}", text, labelled, registry=registry)

        class_ended = counter(
            "class_streams_ended", "Streams by class and by how they ended.", "sla", "reason"
        )
        self._class_ended = cache(class_ended.labels)
        self._class_ttft = Histogram(
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
        tenant_ended = counter(
            "tenant_streams_ended", "Streams by tenant and by how they ended.", "tenant", "reason"
        )
        self._tenant_ended = cache(tenant_ended.labels)
        self._tenant_tokens = counter(
            "tenant_tokens",
            "Tokens of streams by tenant: prompt, generated, delivered, consumed.",
            "tenant",
            "kind",
        )
        self._classes: dict[str, _OfClass] = {}
        self._tenants: dict[str, Mapping[str, Counter]] = {}

    def watch(self, registry: CollectorRegistry, streams: Iterable[Stream]) -> None:
        """Export how many streams there are from now on."""
        registry.register(_Streams(streams, self._labels))

    def settled(self, stream: Stream) -> None:
        """A stream is over. One that was tried on another engine counts there."""
        end = stream.end or "failed"
        if end == "retried":
            return
        sla, tenant, now = stream.grant.sla.name, self._labels.of(stream.tenant), time.monotonic()
        self._class_ended(sla, end).inc()
        self._tenant_ended(tenant, end).inc()
        of_class, of_tenant = self._of_class(sla), self._of_tenant(tenant)
        for kind, tokens in _tokens(stream).items():
            _add(of_class.tokens[kind], tokens)
            _add(of_tenant[kind], tokens)
        tally = stream.reader.tally
        _add(of_class.stalls, tally.stalls)
        _add(of_class.stall_s, tally.stall_s)
        _add(of_class.parked_s, stream.parked_s(now))
        if stream.streaming and end != "refused":
            _note_first_token(of_class, stream)

    def _of_class(self, sla: str) -> _OfClass:
        found = self._classes.get(sla)
        if found is None:
            found = self._classes[sla] = _OfClass(
                self._class_ttft.labels(sla),
                self._class_late.labels(sla),
                {kind: self._class_tokens.labels(sla, kind) for kind in _KINDS},
                self._class_stalls.labels(sla),
                self._class_stall_s.labels(sla),
                self._class_parked_s.labels(sla),
            )
        return found

    def _of_tenant(self, tenant: str) -> Mapping[str, Counter]:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = {
                kind: self._tenant_tokens.labels(tenant, kind) for kind in _KINDS
            }
        return found


def _add(counter: Counter, amount: float) -> None:
    """Most streams have nothing to add to most counters, and each takes a lock."""
    if amount:
        counter.inc(amount)


def _note_first_token(of_class: _OfClass, stream: Stream) -> None:
    if stream.ttft_s is not None:
        of_class.ttft.observe(stream.ttft_s)
    waited_s = stream.ttft_s if stream.ttft_s is not None else (stream.ended or 0.0) - stream.started
    _add(of_class.late, waited_s > stream.grant.ttft_s)


def _tokens(stream: Stream) -> Mapping[str, float]:
    return {
        "prompt": stream.prompt_tokens or 0,
        "generated": stream.generated,
        "delivered": stream.delivered,
        "consumed": min(stream.reader.tally.consumed, stream.generated),
    }


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
