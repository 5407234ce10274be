"""OpenTelemetry: traces and metrics by the GenAI conventions, off unless configured; docs/telemetry.md.

Needs the extra ``otel``. Nothing here is imported while `config.TelemetrySettings.otlp_endpoint` is null.
"""
