"""Traces and metrics of requests through a gateway, in memory and over a real OTLP/HTTP connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.otlp import OtlpReceiver
from support.replay_engine import Hold, ReplayEngine, Script, Send
from support.wire import DONE, text_chunk
from tokenflow_engine.protocol import StreamState
from tokenflow_gateway.app import Gateway
from tokenflow_gateway.telemetry.telemetry import Telemetry

CHAT = "/v1/chat/completions"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
SECRET = "the text of the prompt"
BUSY = Script(status=503, headers={"content-type": "application/json"}, steps=[Send(b'{"message":"full"}')])


class Recorded:
    """A `Telemetry` that keeps everything here."""

    def __init__(self, *, prompts: bool = False) -> None:
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        traces = TracerProvider(shutdown_on_exit=False)
        traces.add_span_processor(SimpleSpanProcessor(self._spans))
        self.telemetry = Telemetry(
            traces, MeterProvider([self._reader], shutdown_on_exit=False), prompts=prompts
        )

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._spans.get_finished_spans()}

    @property
    def all_spans(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()

    def points(self) -> dict[str, list[Any]]:
        """The points of each metric, by its name."""
        data = self._reader.get_metrics_data()
        assert data is not None
        (resource,) = data.resource_metrics
        return {m.name: list(m.data.data_points) for s in resource.scope_metrics for m in s.metrics}


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.recordings("models", "chat_stream_usage")
    scripts |= {"/v1/models": scripts["models"], "busy": BUSY}
    scripts["/model_info"] = Script(headers={"content-type": "application/json"}, steps=[Send(b"{}")])
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr(Gateway, "_telemetry", lambda _self: recorded.telemetry)
    return recorded


def asks(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": SECRET}], **fields}


async def ended(gateway: RunningGateway) -> None:
    """The request's span ends behind the last byte of its answer."""
    await gateway.everything_released()
    await asyncio.sleep(0)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_stream_is_a_span_in_the_callers_trace(engine: ReplayEngine, recorded: Recorded) -> None:
    model = "chat_stream_usage"
    async with running_gateway({"url": engine.base_url, "id": "e", "link": "off"}) as gateway:
        body = asks(model, max_tokens=7, temperature=0.5)
        answer = await gateway.client.post(CHAT, json=body, headers=PARENT)
        assert answer.status_code == 200
        await eventually(lambda: f"POST {CHAT}" in recorded.spans, "the request's span has ended")
    request, attempt = recorded.spans[f"POST {CHAT}"], recorded.spans[f"chat {model}"]

    assert request.kind == SpanKind.SERVER
    assert request.parent is not None
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    assert attributes(request)["http.response.status_code"] == 200
    assert attributes(request)["tokenflow.request_id"] == answer.headers["x-request-id"]

    assert attempt.kind == SpanKind.CLIENT
    assert attempt.parent is not None
    assert attempt.parent.span_id == request.context.span_id
    said = attributes(attempt)
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.provider.name"] == "sglang"
    assert said["gen_ai.request.model"] == model
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.temperature"]) == (7, 0.5)
    assert said["gen_ai.usage.input_tokens"] > 0
    assert said["gen_ai.usage.output_tokens"] == said["tokenflow.delivered_tokens"] > 0
    assert said["tokenflow.end"] == "finished"
    (first,) = attempt.events
    assert first.name == "gen_ai.first_token"
    assert attempt.start_time <= first.timestamp <= attempt.end_time  # type: ignore[operator]


async def test_the_engine_continues_the_trace(engine: ReplayEngine, recorded: Recorded) -> None:
    """Its parent is the attempt, and it gets one `traceparent`: not the client's."""
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        await gateway.client.post(CHAT, json=asks("chat_stream_usage"), headers=PARENT)
        await eventually(lambda: f"POST {CHAT}" in recorded.spans, "the request's span has ended")
    (post,) = [seen for seen in engine.requests if seen.path == CHAT]
    span = recorded.spans["chat chat_stream_usage"].context
    assert post.headers["traceparent"] == f"00-{TRACE_ID}-{span.span_id:016x}-01"
    assert post.headers["tracestate"] == "vendor=1"


async def test_off_the_clients_trace_passes_as_it_came(engine: ReplayEngine) -> None:
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        await gateway.client.post(CHAT, json=asks("chat_stream_usage"), headers=PARENT)
        assert all(stream.trace is None for stream in gateway.streams)
    (post,) = [seen for seen in engine.requests if seen.path == CHAT]
    assert {name: post.headers[name] for name in PARENT} == PARENT


async def test_a_client_that_is_not_sampled_is_not_sampled_here(
    engine: ReplayEngine, recorded: Recorded
) -> None:
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        unsampled = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        await gateway.client.post(CHAT, json=asks("chat_stream_usage"), headers=unsampled)
        await ended(gateway)
    assert not recorded.all_spans
    (post,) = [seen for seen in engine.requests if seen.path == CHAT]
    assert post.headers["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert post.headers["traceparent"].endswith("-00")


@pytest.mark.parametrize("bad", ["", "00-zz-1-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\xff"])
async def test_a_bad_traceparent_begins_a_trace(engine: ReplayEngine, recorded: Recorded, bad: str) -> None:
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        head = {"traceparent": bad.encode("latin-1")}
        answer = await gateway.client.post(CHAT, json=asks("chat_stream_usage"), headers=head)
        assert answer.status_code == 200
        await eventually(lambda: f"POST {CHAT}" in recorded.spans, "the request's span has ended")
    assert recorded.spans[f"POST {CHAT}"].parent is None


async def test_each_engine_that_is_asked_is_a_span(engine: ReplayEngine, recorded: Recorded) -> None:
    async with running_gateway(
        *({"url": engine.base_url, "id": name, "link": "off"} for name in ("a", "b"))
    ) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("busy"))
        assert answer.status_code == 503
        await eventually(lambda: f"POST {CHAT}" in recorded.spans, "the request's span has ended")
    attempts = [span for span in recorded.all_spans if span.name == "chat busy"]
    assert [attributes(span)["tokenflow.end"] for span in attempts] == ["retried", "refused"]
    assert {attributes(span)["tokenflow.engine"] for span in attempts} == {"a", "b"}
    assert [span.status.status_code for span in attempts] == [StatusCode.UNSET, StatusCode.ERROR]
    request = recorded.spans[f"POST {CHAT}"]
    assert request.status.status_code == StatusCode.ERROR
    assert attributes(request)["error.type"] == "503"


async def test_what_the_engine_does_with_a_stream_is_told(engine: ReplayEngine, recorded: Recorded) -> None:
    """Its wait in the engine is a span, and each change of state an event with the policy's reason."""
    gate = asyncio.Event()
    engine.scripts["gated"] = Script(
        steps=[Send(text_chunk("a")), Hold(gate), Send(text_chunk(None, finish="stop") + DONE)]
    )
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        async with gateway.client.stream("POST", CHAT, json=asks("gated")) as answer:
            (stream,) = gateway.streams
            for state, reason in (
                ("waiting", None),
                ("running", None),
                ("running", None),
                ("parked", "ahead"),
            ):
                told = StreamState(rid=stream.rid, state=state, generated=1, reason=reason)  # type: ignore[arg-type]
                gateway.app.streams.apply([told])
            gate.set()
            await answer.aread()
        await eventually(lambda: f"POST {CHAT}" in recorded.spans, "the request's span has ended")
    attempt, queue = recorded.spans["chat gated"], recorded.spans["queue"]
    told = [dict(event.attributes or {}) for event in attempt.events if event.name == "tokenflow.state"]
    assert told == [
        {"tokenflow.state": "waiting"},
        {"tokenflow.state": "running"},
        {"tokenflow.state": "parked", "tokenflow.reason": "ahead"},
    ]
    assert queue.parent is not None
    assert queue.parent.span_id == attempt.context.span_id
    assert attributes(queue) == {"tokenflow.queue": "engine"}


async def test_metrics_of_the_conventions(engine: ReplayEngine, recorded: Recorded) -> None:
    """A model that no engine has is no attribute of a metric: clients could make up any number of them."""
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        await gateway.client.post(CHAT, json=asks("chat_stream_usage"))
        await eventually(lambda: f"POST {CHAT}" in recorded.spans, "the request's span has ended")
    points = recorded.points()
    assert set(points) == {
        "gen_ai.client.token.usage",
        "gen_ai.server.request.duration",
        "gen_ai.server.time_per_output_token",
        "gen_ai.server.time_to_first_token",
        "http.server.request.duration",
    }
    (duration,) = points["gen_ai.server.request.duration"]
    assert (duration.count, duration.attributes["gen_ai.request.model"]) == (1, "_OTHER")
    kinds = {point.attributes["gen_ai.token.type"] for point in points["gen_ai.client.token.usage"]}
    assert kinds == {"input", "output"}


async def test_no_text_of_a_prompt_unless_asked_for(
    engine: ReplayEngine, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants = Recorded(prompts=True)
    for kept, expected in ((recorded, False), (wants, True)):
        monkeypatch.setattr(Gateway, "_telemetry", lambda _self, kept=kept: kept.telemetry)
        async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
            await gateway.client.post(CHAT, json=asks("chat_stream_usage"))
            await eventually(lambda kept=kept: f"POST {CHAT}" in kept.spans, "the span has ended")
        told = json.dumps([json.loads(span.to_json()) for span in kept.all_spans])
        assert (SECRET in told) is expected


async def test_a_fault_of_telemetry_costs_no_request(
    engine: ReplayEngine, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError

    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        for name in ("traces._taken_from", "traces._of", "measures.Measures.http"):
            with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
                patch.setattr(f"tokenflow_gateway.telemetry.{name}", fails)
                answer = await gateway.client.post(CHAT, json=asks("chat_stream_usage"))
                assert answer.status_code == 200
                assert answer.content.endswith(DONE)
                await ended(gateway)
                await eventually(
                    lambda logs=logs: any(log["event"] == "fault in telemetry" for log in logs),
                    "it is logged",
                )


async def test_a_collector_gets_it_over_the_wire(
    engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real exporters, to the end of a gateway that shuts down: nothing is left behind."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    async with OtlpReceiver() as receiver:
        telemetry = {"otlp_endpoint": receiver.base_url}
        async with running_gateway(
            {"url": engine.base_url, "link": "off"}, telemetry=telemetry, gateway_id="g"
        ) as gateway:
            await gateway.client.post(CHAT, json=asks("chat_stream_usage"), headers=PARENT)
            await ended(gateway)
        assert set(receiver.spans) == {f"POST {CHAT}", "chat chat_stream_usage"}
        assert receiver.spans[f"POST {CHAT}"].trace_id.hex() == TRACE_ID
        assert receiver.resource["service.name"] == "tokenflow-gateway"
        assert receiver.resource["service.instance.id"] == "g"
        assert receiver.resource["deployment.environment.name"] == "test"
        assert "gen_ai.server.time_to_first_token" in receiver.metrics


async def test_a_collector_that_is_away_costs_no_request(
    engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow_gateway.telemetry.telemetry._FLUSH_WITHIN_S", 0.1)
    async with running_gateway(
        {"url": engine.base_url, "link": "off"}, telemetry={"otlp_endpoint": "http://127.0.0.1:9"}
    ) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("chat_stream_usage"))
        assert answer.content.endswith(DONE)
        await ended(gateway)
