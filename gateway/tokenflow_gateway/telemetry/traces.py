"""The spans of one request: the request itself, its waits, and what was asked of each engine.

Nothing is done per token: the first token becomes an event when its stream has ended, from the time that the
stream keeps anyway.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tokenflow_gateway.telemetry import names
from tokenflow_gateway.telemetry.harmless import harmless

if TYPE_CHECKING:
    from tokenflow_gateway.relay.exchange import Exchange
    from tokenflow_gateway.relay.request import Body
    from tokenflow_gateway.relay.stream import End, Stream
    from tokenflow_gateway.relay.upstream import Header
    from tokenflow_gateway.telemetry.measures import Attributes, Measures

__all__ = ["AttemptTrace", "RequestTrace"]

_PARENT, _STATE = b"traceparent", b"tracestate"
_MAX_PROMPT_BYTES = 32 * 1024
_MAX_STATES = 100
"""Changes of state that one span tells: a stream that is parked all the time shall not grow without end."""
_SERVER_ERROR = 500
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_TEXT_COMPLETION = "/v1/completions"
_WELL: Final[frozenset[str]] = frozenset({"finished", "client_gone", "retried"})
"""Ends that are no error of the engine's or ours."""

_propagator = TraceContextTextMapPropagator()


class RequestTrace:
    """A client's request, from its head to the end of its answer."""

    __slots__ = (
        "_began",
        "_context",
        "_current",
        "_measures",
        "_method",
        "_prompts",
        "_route",
        "_span",
        "_tracer",
    )

    def __init__(
        self, exchange: Exchange, route: str | None, *, tracer: Tracer, measures: Measures, prompts: bool
    ) -> None:
        """Takes the client's ``traceparent`` out of `exchange.headers`: engines get one of our own."""
        self._tracer, self._measures, self._prompts = tracer, measures, prompts
        self._began = time.monotonic()
        self._route = route
        self._method = exchange.method if exchange.method in _METHODS else "_OTHER"
        parent = _taken_from(exchange)
        self._span = tracer.start_span(
            f"{self._method} {route}" if route else self._method,
            context=parent,
            kind=SpanKind.SERVER,
            attributes={
                names.HTTP_METHOD: self._method,
                names.URL_PATH: exchange.path,
                names.REQUEST_ID: exchange.request_id,
                **({names.HTTP_ROUTE: route} if route else {}),
            },
        )
        self._context = set_span_in_context(self._span, parent)
        self._current = self._context

    @property
    def trace_id(self) -> str:
        """As logs and other systems spell it."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def propagated(self) -> list[Header]:
        """The headers by which what is asked now continues the trace."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, context=self._current)
        return [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]

    @harmless
    def waited(self, queue: str, since: float) -> None:
        """The request waited in `queue` from `since` (monotonic) until now."""
        _record_wait(self._tracer, self._context, queue, since)

    @harmless
    def attempt(self, stream: Stream, body: Body) -> AttemptTrace:
        """What is asked of an engine from now on is part of this stream's span."""
        attempt = AttemptTrace(
            stream,
            body,
            tracer=self._tracer,
            measures=self._measures,
            parent=self._context,
            prompts=self._prompts,
        )
        self._current = attempt.context
        return attempt

    @harmless
    def end(self, status: int | None) -> None:
        """The answer had this status; None where there was none."""
        attributes: dict[str, str | int] = {names.HTTP_METHOD: self._method}
        if self._route:
            attributes[names.HTTP_ROUTE] = self._route
        if status is not None:
            self._span.set_attribute(names.HTTP_STATUS, status)
            attributes[names.HTTP_STATUS] = status
        if status is not None and status >= _SERVER_ERROR:
            attributes[names.ERROR_TYPE] = str(status)
            _fail(self._span, str(status))
        self._measures.http(attributes, time.monotonic() - self._began, self._context)
        self._span.end()


class AttemptTrace:
    """One stream on one engine."""

    __slots__ = ("_began", "_measures", "_queued", "_span", "_states", "_tracer", "context", "trace_id")

    def __init__(
        self,
        stream: Stream,
        body: Body,
        *,
        tracer: Tracer,
        measures: Measures,
        parent: Context,
        prompts: bool,
    ) -> None:
        self._tracer, self._measures = tracer, measures
        self._began = time.monotonic()
        self._queued = True
        self._states = 0
        attributes: dict[str, str | int | float | bool] = {**_of(stream), names.STREAM: stream.streaming}
        if stream.model:
            attributes[names.REQUEST_MODEL] = stream.model
        attributes |= _parameters(body)
        if prompts:
            attributes[names.INPUT_MESSAGES] = _prompt(body)
        operation = attributes[names.OPERATION]
        self._span: Span = tracer.start_span(
            f"{operation} {stream.model}".strip(),
            context=parent,
            kind=SpanKind.CLIENT,
            attributes={
                **attributes,
                names.RID: stream.rid,
                names.TENANT: stream.tenant,
                names.READER: stream.reader.reader,
                names.ENGINE: stream.engine.name,
            },
        )
        self.context = set_span_in_context(self._span, parent)
        self.trace_id = f"{self._span.get_span_context().trace_id:032x}"

    @harmless
    def state(self, state: str, reason: str | None) -> None:
        """The engine has the stream wait, run, or parked from now on; of no interest once it has ended."""
        if not self._span.is_recording():
            return
        if self._queued and state != "waiting":
            self._queued = False
            _record_wait(self._tracer, self.context, "engine", self._began)
        self._states += 1
        if self._states <= _MAX_STATES:
            self._span.add_event(
                names.STATE, {names.STATE: state, **({names.REASON: reason} if reason else {})}
            )

    @harmless
    def end(self, stream: Stream, end: End) -> None:
        """The stream is over, for the client at least."""
        span = self._span
        first_s = None
        if stream.first_token is not None:
            first_s = stream.first_token - stream.started
            span.add_event(names.FIRST_TOKEN, timestamp=_wall_ns(stream.first_token))
            span.set_attribute(names.TIME_TO_FIRST, first_s)
        span.set_attributes(
            {names.END: end, names.OUTPUT_TOKENS: stream.generated, names.DELIVERED_TOKENS: stream.delivered}
        )
        if stream.prompt_tokens is not None:
            span.set_attribute(names.INPUT_TOKENS, stream.prompt_tokens)
        measured: dict[str, str | int] = {**_of(stream), names.REQUEST_MODEL: _known_model(stream)}
        if end not in _WELL:
            measured[names.ERROR_TYPE] = end
            _fail(span, end)
        if end != "retried":
            self._measures.generation(
                measured,
                duration_s=time.monotonic() - stream.started,
                first_s=first_s,
                input_tokens=stream.prompt_tokens,
                output_tokens=stream.generated,
                context=self.context,
            )
        span.end()


def _taken_from(exchange: Exchange) -> Context:
    """The context that the client sent; an empty one if it sent none, or two."""
    parents = [value for name, value in exchange.headers if name == _PARENT]
    states = [value for name, value in exchange.headers if name == _STATE]
    exchange.headers = [header for header in exchange.headers if header[0] not in {_PARENT, _STATE}]
    if len(parents) != 1:
        return Context()
    carrier = {"traceparent": parents[0].decode("latin-1"), "tracestate": b",".join(states).decode("latin-1")}
    return _propagator.extract(carrier, context=Context())


def _of(stream: Stream) -> Attributes:
    """What a generation's span and its metrics share."""
    parts = urlsplit(stream.engine.config.url)
    operation = "text_completion" if stream.route == _TEXT_COMPLETION else "chat"
    return {
        names.OPERATION: operation,
        names.PROVIDER: stream.engine.kind,
        names.SERVER_ADDRESS: parts.hostname or "",
        names.SERVER_PORT: parts.port or (443 if parts.scheme == "https" else 80),
    }


def _known_model(stream: Stream) -> str:
    """A client may write anything there; a metric's attribute takes what exists."""
    return stream.model if stream.model in stream.engine.model_ids else "_OTHER"


def _parameters(body: Body) -> Mapping[str, int | float]:
    found: dict[str, int | float] = {}
    for field, name in names.REQUEST_PARAMETERS.items():
        if (raw := body.get(field)) is not None:
            try:
                found[name] = msgspec.json.decode(raw, type=int | float)
            except msgspec.DecodeError:
                continue  # null, or a fault that the engine answers
    return found


def _prompt(body: Body) -> str:
    """Messages, input or prompt as the client sent them, cut off at a limit."""
    for field in ("messages", "input", "prompt"):
        if (raw := body.get(field)) is not None:
            return bytes(raw)[:_MAX_PROMPT_BYTES].decode("utf-8", "replace")
    return ""


def _record_wait(tracer: Tracer, context: Context, queue: str, since: float) -> None:
    began = _wall_ns(since)
    tracer.start_span("queue", context=context, start_time=began, attributes={names.QUEUE: queue}).end()


def _wall_ns(at: float) -> int:
    """Monotonic seconds as nanoseconds of the wall clock, as it is now."""
    return time.time_ns() - int((time.monotonic() - at) * 1e9)


def _fail(span: Span, kind: str) -> None:
    span.set_attribute(names.ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR))
