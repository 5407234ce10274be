"""Metrics by class of service and, for a bounded number of them, by tenant."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tokenflow_engine.control.durations import DurationCounts
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.sums import Histograms, Sum, Sums

__all__ = ["OTHER", "TenantLabels", "TenantMetrics"]

OTHER: Final = "other"
"""Label of all tenants beyond the bound together."""

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


class _Tokens(NamedTuple):
    """Each is the kind of that name."""

    prompt: Sum
    generated: Sum
    delivered: Sum
    consumed: Sum

    def add(self, prompt: int, generated: int, delivered: int, consumed: float) -> None:
        self.prompt.amount += prompt
        self.generated.amount += generated
        self.delivered.amount += delivered
        self.consumed.amount += consumed


class _OfClass(NamedTuple):
    """The metrics of one class: to look them up by its label takes longer than to write them."""

    ttft: DurationCounts
    late: Sum
    tokens: _Tokens
    stalls: Sum
    stall_s: Sum
    parked_s: Sum


class TenantMetrics:
    """Written once for each stream, when its counts are final; gauges are read when scraped."""

    def __init__(self, registry: CollectorRegistry, sums: Sums, labels: TenantLabels) -> None:
        """`sums` are the registry's."""
        self._labels = labels
        self._sums = sums

        def counter(name: str, text: str, *labelled: str) -> Counter:
            return Counter(f"tokenflow_{name}", text, labelled, registry=registry)

        class_ended = counter(
            "class_streams_ended", "Streams by class and by how they ended.", "sla", "reason"
        )
        self._class_ended = cache(lambda *of: sums.of(class_ended.labels(*of)))
        self._class_ttft = Histograms(
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
        self._tenant_ended = cache(lambda *of: sums.of(tenant_ended.labels(*of)))
        self._tenant_tokens = counter(
            "tenant_tokens",
            "Tokens of streams by tenant: prompt, generated, delivered, consumed.",
            "tenant",
            "kind",
        )
        self._classes: dict[str, _OfClass] = {}
        self._tenants: dict[str, _Tokens] = {}

    def watch(self, registry: CollectorRegistry, streams: Iterable[Stream]) -> None:
        """Export how many streams there are from now on."""
        registry.register(_Streams(streams, self._labels))

    def settled(self, stream: Stream) -> None:
        """A stream is over. One that was tried on another engine counts there."""
        end = stream.end or "failed"
        if end == "retried":
            return
        sla, tenant, now = stream.grant.sla.name, self._labels.of(stream.tenant), time.monotonic()
        self._class_ended(sla, end).amount += 1
        self._tenant_ended(tenant, end).amount += 1
        of_class, tally, generated = self._of_class(sla), stream.reader.tally, stream.generated
        tokens = (
            stream.prompt_tokens or 0,
            generated,
            stream.delivered,
            min(tally.consumed, generated),
        )
        of_class.tokens.add(*tokens)
        self._of_tenant(tenant).add(*tokens)
        of_class.stalls.amount += tally.stalls
        of_class.stall_s.amount += tally.stall_s
        of_class.parked_s.amount += stream.parked_s(now)
        if stream.streaming and end != "refused":
            _note_first_token(of_class, stream)

    def _of_class(self, sla: str) -> _OfClass:
        found = self._classes.get(sla)
        if found is None:
            found = self._classes[sla] = _OfClass(
                self._class_ttft.labels(sla),
                self._sums.of(self._class_late.labels(sla)),
                self._tokens_of(self._class_tokens, sla),
                self._sums.of(self._class_stalls.labels(sla)),
                self._sums.of(self._class_stall_s.labels(sla)),
                self._sums.of(self._class_parked_s.labels(sla)),
            )
        return found

    def _of_tenant(self, tenant: str) -> _Tokens:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = self._tokens_of(self._tenant_tokens, tenant)
        return found

    def _tokens_of(self, counter: Counter, label: str) -> _Tokens:
        return _Tokens(*(self._sums.of(counter.labels(label, kind)) for kind in _Tokens._fields))


def _note_first_token(of_class: _OfClass, stream: Stream) -> None:
    ttft_s = stream.ttft_s
    if ttft_s is not None:
        of_class.ttft.add(ttft_s)
    waited_s = ttft_s if ttft_s is not None else (stream.ended or 0.0) - stream.started
    of_class.late.amount += waited_s > stream.grant.ttft_s


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
