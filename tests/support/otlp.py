"""A receiver of OTLP over HTTP, which keeps what it gets."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.replay_engine import ReplayEngine, Script, SeenRequest

__all__ = ["OtlpReceiver"]

_EMPTY = Script(headers={"content-type": "application/x-protobuf", "content-length": "0"}, steps=[])


class OtlpReceiver(ReplayEngine):
    """At `base_url`, until the block ends. `resource` is that of the last request with spans."""

    def __init__(self) -> None:
        super().__init__({"/v1/traces": _EMPTY, "/v1/metrics": _EMPTY})
        self.came = asyncio.Event()

    def script_for(self, seen: SeenRequest) -> Script:
        self.came.set()
        return self.scripts[seen.path]

    @property
    def spans(self) -> dict[str, Any]:
        """The spans that have come, by name."""
        return {
            span.name: span for resource in self._traces() for s in resource.scope_spans for span in s.spans
        }

    @property
    def resource(self) -> dict[str, str]:
        *_, last = self._traces()
        return {pair.key: pair.value.string_value for pair in last.resource.attributes}

    @property
    def metrics(self) -> set[str]:
        """Names of the metrics that have come."""
        requests = (ExportMetricsServiceRequest.FromString(body) for body in self._bodies("/v1/metrics"))
        return {
            metric.name
            for request in requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def _traces(self) -> Iterator[Any]:
        for body in self._bodies("/v1/traces"):
            yield from ExportTraceServiceRequest.FromString(body).resource_spans

    def _bodies(self, path: str) -> Iterator[bytes]:
        for seen in self.requests:
            if seen.path == path:
                zipped = seen.headers.get("content-encoding") == "gzip"
                yield gzip.decompress(seen.body) if zipped else seen.body
