"""Exporters over OTLP/HTTP, as the configuration and OpenTelemetry's own variables want them."""

from __future__ import annotations

from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from tokenflow_gateway.config import TelemetrySettings
from tokenflow_gateway.telemetry.telemetry import Telemetry

__all__ = ["open_telemetry"]


def open_telemetry(settings: TelemetrySettings, *, gateway_id: str) -> Telemetry:
    """Begin to export. Starts threads: call it in the process that serves, not before a fork."""
    assert settings.otlp_endpoint is not None
    base = settings.otlp_endpoint.rstrip("/")
    ours = {
        "service.name": "tokenflow-gateway",
        "service.version": version("tokenflow-serving"),
        "service.instance.id": gateway_id,
    }
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME and so on win
    traces = TracerProvider(
        resource=resource, sampler=ParentBasedTraceIdRatio(settings.sample), shutdown_on_exit=False
    )
    traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{base}/v1/traces")))
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(endpoint=f"{base}/v1/metrics"),
        export_interval_millis=settings.metrics_every_s * 1000,
    )
    metrics = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    return Telemetry(traces, metrics, prompts=settings.prompts)
