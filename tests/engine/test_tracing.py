"""One trace from a client through the gateway into the real engine.

The engine's environment has OpenTelemetry's interface only; with its SDK and both exporters on the engine's
path (``pip install --target``, PYTHONPATH) this runs.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable

import pytest

from support.gateway import eventually, running_gateway
from support.otlp import OtlpReceiver
from support.real_engine import RealEngine, engine_python

CHAT = "/v1/chat/completions"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
_NEEDED = "import opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
_OVER_HTTP = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "100",
}

pytestmark = pytest.mark.engine


def _can_trace() -> bool:
    return subprocess.run([engine_python(), "-c", _NEEDED], capture_output=True, check=False).returncode == 0


async def test_the_engines_spans_hang_under_ours(new_engine: Callable[..., RealEngine]) -> None:
    if not _can_trace():
        pytest.skip("the engine's environment has no opentelemetry-sdk")
    async with OtlpReceiver() as receiver:
        engine = new_engine(
            "--enable-trace", "--otlp-traces-endpoint", f"{receiver.base_url}/v1/traces", env=_OVER_HTTP
        )
        await asyncio.to_thread(engine.start)
        try:
            await _asks(engine, receiver)
        finally:
            await asyncio.to_thread(engine.stop)
    ours = receiver.spans["chat tiny"]
    (of_request,) = [
        span
        for name, span in receiver.spans.items()
        if " Req " in name and span.parent_span_id == ours.span_id
    ]
    assert of_request.trace_id.hex() == TRACE_ID
    assert receiver.spans[f"POST {CHAT}"].parent_span_id.hex() == PARENT_ID
    assert {"prefill_forward", "decode_forward"} <= set(receiver.spans)


async def _asks(engine: RealEngine, receiver: OtlpReceiver) -> None:
    async with running_gateway(
        {"url": engine.base_url, "id": "e", "link": engine.link},
        link_secret=engine.secret,
        telemetry={"otlp_endpoint": receiver.base_url},
    ) as gateway:
        (known,) = gateway.app.registry
        await eventually(lambda: known.linked, "the plugin is linked")
        body = {
            "model": "tiny",
            "stream": True,
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "a"}],
        }
        head = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        answer = await gateway.client.post(CHAT, json=body, headers=head)
        assert answer.status_code == 200
        await eventually(
            lambda: any(
                " Req " in name and span.trace_id.hex() == TRACE_ID for name, span in receiver.spans.items()
            ),
            "the engine has sent the request's spans",
        )
