"""What the gateway knows of OpenTelemetry: providers of its own, nothing global."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

import structlog
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from tokenflow_gateway.relay.routes import route_of
from tokenflow_gateway.telemetry import names
from tokenflow_gateway.telemetry.harmless import harmless
from tokenflow_gateway.telemetry.measures import Measures
from tokenflow_gateway.telemetry.traces import RequestTrace

if TYPE_CHECKING:
    from tokenflow_gateway.relay.exchange import Exchange

__all__ = ["Telemetry"]

_log = structlog.stdlib.get_logger("tokenflow.telemetry")

_FLUSH_WITHIN_S = 3.0
_SCOPE = "tokenflow_gateway"


class Telemetry:
    """Begins the trace of each request. One per process, with threads that export; closed at its end."""

    def __init__(self, traces: TracerProvider, metrics: MeterProvider, *, prompts: bool) -> None:
        """`prompts`: the text of requests goes out, too."""
        self._providers = (traces, metrics)
        self._tracer = traces.get_tracer(_SCOPE, schema_url=names.SCHEMA_URL)
        self._measures = Measures(metrics.get_meter(_SCOPE, schema_url=names.SCHEMA_URL))
        self._prompts = prompts

    @harmless
    def request(self, exchange: Exchange) -> RequestTrace:
        """The trace of a request that has just come."""
        return RequestTrace(
            exchange,
            route_of(exchange.path),
            tracer=self._tracer,
            measures=self._measures,
            prompts=self._prompts,
        )

    async def aclose(self) -> None:
        """Send what is left, for a few seconds at most; what cannot be sent is given up.

        On a thread that nobody waits for: an exporter tries again for longer than a gateway may take to go.
        """
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            for provider in self._providers:
                provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has not waited
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=send, name="telemetry", daemon=True).start()
        try:
            async with asyncio.timeout(_FLUSH_WITHIN_S):
                await sent.wait()
        except TimeoutError:
            _log.warning("the last spans and metrics were not taken in time")
