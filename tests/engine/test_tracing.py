"""One trace from a client through the gateway into the real engine.

The engine's environment has OpenTelemetry's interface only; its SDK and exporters lie in another one, on the
engine's path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from compat import environments
from support.gateway import eventually, running_gateway
from support.otlp import OtlpReceiver
from support.real_engine import RealEngine

CHAT = "/v1/chat/completions"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
_OVER_HTTP = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "100",
}

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


def _packages() -> Path:
    (found,) = environments.python("engine-tracing").parents[1].glob("lib/python*/site-packages")
    return found


async def test_the_engines_spans_hang_under_ours(new_engine: Callable[..., RealEngine]) -> None:
    env = _OVER_HTTP | {"PYTHONPATH": str(await asyncio.to_thread(_packages))}
    async with OtlpReceiver() as receiver:
        engine = new_engine(
            "--enable-trace", "--otlp-traces-endpoint", f"{receiver.base_url}/v1/traces", env=env
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
