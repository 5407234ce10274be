"""Prometheus metrics: nothing is done per token.

Counters are written once when a stream ends, those of readers at each look at one (four times a second, at
reports and at the end); gauges are read when scraped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenflow_engine.control.durations import DurationCounts
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.readers.estimator import Source
from tokenflow_gateway.readers.slack import SlackCollector
from tokenflow_gateway.readers.tally import Look
from tokenflow_gateway.relay.stream import End, Stream, StreamTable
from tokenflow_gateway.sums import Histograms, Sum, Sums, cumulative

__all__ = ["Metrics"]

_BETWEEN_TOKENS_S = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class _OfEngine(NamedTuple):
    """What has the engine's label: looking one up takes longer than counting."""

    generated: Sum
    delivered: Sum
    prompt: Sum
    ttft: DurationCounts
    duration: DurationCounts
    effective: Sum
    time_per_token: DurationCounts


class Metrics:
    """The gateway's metrics on a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # half of all lines, and nobody reads them
        self.registry = CollectorRegistry()
        self.sums = Sums(self.registry)
        self.responses = Counter(
            "tokenflow_responses", "Answers begun.", ["route", "status"], registry=self.registry
        )
        self.timeouts = Counter(
            "tokenflow_timeouts",
            "Requests ended because a phase took too long: body, connect, first_byte, idle or total.",
            ["route", "phase"],
            registry=self.registry,
        )
        self.connections_refused = Counter(
            "tokenflow_connections_refused",
            "Connections of clients beyond max_connections: answered 503, or cut off.",
            registry=self.registry,
        )
        self.retries = Counter(
            "tokenflow_retries",
            "Requests that this engine did nothing for, and another one was asked, by what had happened.",
            ["engine", "reason"],
            registry=self.registry,
        )
        self.rejected = Counter(
            "tokenflow_rejected",
            "Requests turned away: by a limit (requests, tokens, streams, budget), by the queue (queue_full, "
            "queue_timeout), or because no engine was there (no_engine).",
            ["reason"],
            registry=self.registry,
        )
        self.usage_dropped = Counter(
            "tokenflow_usage_dropped",
            "Records of usage that were not written, because the disk was too slow or not there.",
            registry=self.registry,
        )
        self.ended = Counter(
            "tokenflow_streams_ended",
            "Requests that reached an engine, by how they ended.",
            ["engine", "route", "reason"],
            registry=self.registry,
        )
        self.ttft = Histograms(
            "tokenflow_time_to_first_token_seconds",
            "Arrival of a streaming request to its first content handed to the client.",
            ["engine"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histograms(
            "tokenflow_request_seconds",
            "Arrival of a request that reached an engine to its end for the client, however it ended.",
            ["engine"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.time_per_token = Histograms(
            "tokenflow_time_per_output_token_seconds",
            "Mean time between tokens (TBT, TPOT) as the client was handed them, of each finished stream.",
            ["engine"],
            buckets=_BETWEEN_TOKENS_S,
            registry=self.registry,
        )
        self.effective_tokens = Counter(
            "tokenflow_effective_tokens",
            "Tokens by their weight: 1 if at most a tenth of the answer was unread as each came, 0 from a "
            "fifth on (effective throughput of the TokenFlow paper). It rewards slowness: see stalls, too.",
            ["engine"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "tokenflow_prompt_tokens", "Prompt tokens.", ["engine"], registry=self.registry
        )
        self.generated_tokens = Counter(
            "tokenflow_generated_tokens",
            "Output tokens generated, those of aborted requests included.",
            ["engine"],
            registry=self.registry,
        )
        self.delivered_tokens = Counter(
            "tokenflow_delivered_tokens",
            "Output tokens handed to clients.",
            ["engine"],
            registry=self.registry,
        )
        self.count_mismatches = Counter(
            "tokenflow_count_mismatches",
            "Finished requests whose plugin count differs from the engine's usage: should stay 0.",
            ["engine"],
            registry=self.registry,
        )
        self.progress_requests = Counter(
            "tokenflow_progress_requests",
            "Requests with progress reports, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.progress_forwarded = Counter(
            "tokenflow_progress_forwarded",
            "Requests with progress reports that came to another worker or gateway than their stream's.",
            registry=self.registry,
        )
        self.progress_clamped = Counter(
            "tokenflow_progress_clamped",
            "Reports of a position beyond what was delivered, taken as all of that.",
            registry=self.registry,
        )
        self.estimator_error = Histogram(
            "tokenflow_estimator_error_tokens",
            "How far the estimate was off from a reported position, at the time that it was true.",
            buckets=(0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128),
            registry=self.registry,
        )
        self._readers = _ReaderTotals()
        self.registry.register(self._readers)
        self.aborts = Counter(
            "tokenflow_aborts",
            "Requests ended before the engine was done: confirmed gone over the link, not confirmed in time, "
            "or told without a link.",
            ["outcome"],
            registry=self.registry,
        )
        abort_confirm = Histograms(
            "tokenflow_abort_confirm_seconds",
            "From the end of a request for its client to the engine's word that it is gone.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._abort_confirm = abort_confirm.labels()

        self._responses: dict[tuple[str, int | None], Sum] = {}
        self._ended: dict[tuple[str, str, End], Sum] = {}
        self._of_engine: dict[str, _OfEngine] = {}

    def watch_connections(self, count: Callable[[], int]) -> None:
        """Export how many clients are connected from now on."""
        connections = Gauge(
            "tokenflow_client_connections", "Connections of clients now.", registry=self.registry
        )
        connections.set_function(count)

    def watch(self, engines: Iterable[Engine], streams: StreamTable) -> None:
        """Export the gauges of engines, readers and what waits for clients from now on."""
        self.registry.register(_EngineCollector(list(engines)))
        self.registry.register(_ReaderCollector(streams))
        self.registry.register(SlackCollector(streams))
        held = Gauge(
            "tokenflow_held_bytes",
            "Bytes that wait in the gateway for clients, those of streams that have ended included.",
            registry=self.registry,
        )
        held.set_function(lambda: streams.held_bytes)

    def stream_ended(self, stream: Stream, end: End) -> None:
        engine = stream.engine.name
        of_engine = self._of_engine.get(engine)
        if of_engine is None:
            of_engine = self._of_engine[engine] = self._counted_of(engine)
        ended = self._ended.get((engine, stream.route, end))
        if ended is None:
            counter = self.ended.labels(engine, stream.route, end)
            ended = self._ended[engine, stream.route, end] = self.sums.of(counter)
        ended.amount += 1
        of_engine.generated.amount += stream.generated
        of_engine.delivered.amount += stream.delivered
        of_engine.prompt.amount += stream.prompt_tokens or 0
        now = time.monotonic()
        if end != "retried":
            of_engine.duration.add(now - stream.started)
        if stream.first_token is not None:
            of_engine.ttft.add(stream.first_token - stream.started)
        if stream.streaming and end != "retried":
            _note_pace(of_engine, stream, end, now)

    def _counted_of(self, engine: str) -> _OfEngine:
        return _OfEngine(
            self.sums.of(self.generated_tokens.labels(engine)),
            self.sums.of(self.delivered_tokens.labels(engine)),
            self.sums.of(self.prompt_tokens.labels(engine)),
            self.ttft.labels(engine),
            self.duration.labels(engine),
            self.sums.of(self.effective_tokens.labels(engine)),
            self.time_per_token.labels(engine),
        )

    def response_begun(self, route: str, status: int | None) -> None:
        """An answer has begun; None: there was none."""
        response = self._responses.get((route, status))
        if response is None:
            name = "none" if status is None else str(status)
            response = self._responses[route, status] = self.sums.of(self.responses.labels(route, name))
        response.amount += 1

    @contextmanager
    def delivering_after_end(self, stream: Stream) -> Iterator[None]:
        """Count what the client is handed inside: the stream was counted when it ended."""
        before = stream.delivered
        try:
            yield
        finally:
            self.delivered_tokens.labels(stream.engine.name).inc(stream.delivered - before)

    def reader_looked_at(self, source: Source, look: Look) -> None:
        self._readers.add(source, look)

    def generated_late(self, stream: Stream, tokens: int) -> None:
        """Count what the engine generated before it heard that the stream had ended, if it did."""
        if tokens > 0:
            self.generated_tokens.labels(stream.engine.name).inc(tokens)

    def abort_confirmed(self, after_s: float) -> None:
        self.aborts.labels("confirmed").inc()
        self._abort_confirm.add(after_s)


def _note_pace(of_engine: _OfEngine, stream: Stream, end: End, now: float) -> None:
    """Once its reader has been looked at for the last time."""
    of_engine.effective.amount += stream.reader.leads.effective_tokens()
    if end == "finished" and stream.first_token is not None and stream.delivered > 1:
        of_engine.time_per_token.add((now - stream.first_token) / (stream.delivered - 1))


class _EngineCollector(Collector):
    """Gauges per engine. What an unlinked engine does not tell is absent, not zero."""

    _ALWAYS: tuple[tuple[str, str, Callable[[Engine], float]], ...] = (
        ("tokenflow_engine_healthy", "1 if the engine answers its health probe.", lambda e: float(e.healthy)),
        ("tokenflow_engine_linked", "1 if the link to the engine's plugin is up.", lambda e: float(e.linked)),
        (
            "tokenflow_engine_link_dropped",
            "Messages its plugin was not sent because it did not read: should stay 0.",
            lambda e: float(e.link_dropped),
        ),
        (
            "tokenflow_engine_draining",
            "1 while the engine gets no new requests, because somebody has said so.",
            lambda e: float(e.draining),
        ),
        (
            "tokenflow_engine_breaker_open",
            "1 while requests are kept from the engine because they failed there.",
            lambda e: float(e.breaker.state(time.monotonic()) != "closed"),
        ),
        (
            "tokenflow_engine_streams",
            "Requests of this gateway on the engine.",
            lambda e: float(len(e.streams)),
        ),
    )
    _LINKED = (
        ("running", "Requests in the engine's running batch."),
        ("waiting", "Requests in the engine's queue."),
        ("parked", "Streams preempted because their readers are ahead."),
        ("offloaded", "Streams preempted whose KV is in host memory."),
        ("kv_used_tokens", "KV cache tokens in use."),
        ("kv_tokens", "KV cache tokens in all."),
        ("tokens_per_s", "Output tokens generated per second."),
        ("hook_errors", "Errors of the plugin's own code that it caught: should stay 0."),
        ("plan_errors", "Plans that failed, or could not be carried out: should stay 0."),
        ("plans", "Plans made."),
        ("plan_s", "Seconds spent planning."),
        ("came_back", "Preempted streams that came back with their KV."),
        ("away_s", "Seconds they were out of the batch, in all."),
        ("written_bytes", "KV copied to host memory."),
        ("loaded_bytes", "KV copied back."),
        ("write_bytes_per_s", "How fast the last copies to host memory were; 0 before the first."),
        ("load_bytes_per_s", "How fast the last copies back were; 0 before the first."),
        ("host_refused", "1 where host memory failed to open, or copies were not exact. Should stay 0."),
        ("ranks_lost", "1 once tensor-parallel ranks do not agree on KV copies any more. Should stay 0."),
        ("host_tokens", "KV tokens that host memory has room for."),
        ("host_used_tokens", "KV tokens in host memory."),
        ("synced_share", "Share of the KV on the device that host memory holds too."),
        ("copy_wait_s", "Seconds in which the scheduler waited for copies: 0 while they may overlap."),
        ("evicted_tokens", "KV tokens of streams that had to leave the device."),
        ("evicted_synced_tokens", "Those of them that host memory held already: free to drop."),
    )

    _LABELLED = (
        ("preemptions", "kind", "Since the engine's start, by kind."),
        ("departures", "reason", "Started streams that left the batch since the engine's start, by reason."),
        (
            "stalls",
            "reason",
            "Readers who ran dry while their stream was out of the batch, by the reason for which it was.",
        ),
        (
            "suspended",
            "policy",
            "1 for a policy that failed and is tried again later: first come, first served, until then.",
        ),
        (
            "fixed",
            "reason",
            "1 where no stream is ever preempted, by the reason: how the engine was started.",
        ),
        ("stall_s", "reason", "Seconds that they waited so, until their stream was back."),
        (
            "synced_evictions",
            "passes",
            "Streams in host memory but for their last tokens when they were to leave the device, by the "
            "passes after that until their memory was free.",
        ),
    )

    def __init__(self, engines: list[Engine]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        for name, text, value in self._ALWAYS:
            family = GaugeMetricFamily(name, text, labels=["engine"])
            for engine in self._engines:
                family.add_metric([engine.name], value(engine))
            yield family
        for field, text in self._LINKED:
            family = GaugeMetricFamily(f"tokenflow_engine_{field}", text, labels=["engine"])
            for engine in self._engines:
                if engine.linked and engine.stats is not None:
                    family.add_metric([engine.name], float(getattr(engine.stats, field)))
            yield family
        for field, label, text in self._LABELLED:
            family = GaugeMetricFamily(f"tokenflow_engine_{field}", text, labels=["engine", label])
            for engine in self._engines:
                if engine.linked and engine.stats is not None:
                    for value, count in getattr(engine.stats, field).items():
                        family.add_metric([engine.name, value], float(count))
            yield family
        yield self._returns()
        yield self._plans()

    def _returns(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            "tokenflow_engine_return_seconds",
            "From the decision to bring a preempted stream back to its first pass, by its way back.",
            labels=["engine", "kind"],
        )
        for engine in self._engines:
            if engine.linked and engine.stats is not None:
                for kind, durations in engine.stats.return_s.items():
                    family.add_metric([engine.name, kind], cumulative(durations), sum_value=durations.sum_s)
        return family

    def _plans(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            "tokenflow_engine_plan_seconds", "CPU time of each plan.", labels=["engine"]
        )
        for engine in self._engines:
            times = engine.stats.plan_times if engine.linked and engine.stats is not None else None
            if times is not None:
                family.add_metric([engine.name], cumulative(times), sum_value=times.sum_s)
        return family


class _ReaderTotals(Collector):
    """Counters of what readers did, by the evidence it rests on: plain sums, as they are added to often."""

    _COUNTERS = (
        ("tokenflow_reader_pauses", "Pauses of readers, but for those over within a quarter of a second."),
        (
            "tokenflow_reader_stalls",
            "Times a reader was found waiting for more text, after the first token and before the last "
            "(looked for four times a second).",
        ),
        (
            "tokenflow_reader_stall_seconds",
            "Seconds readers waited so; a single wait to about an eighth of a second.",
        ),
        (
            "tokenflow_consumed_tokens",
            "Tokens of streams that were read (estimate). What is read after the end of an answer is counted "
            "when it is reported, and else five minutes after the end.",
        ),
    )

    def __init__(self) -> None:
        self._sums: dict[Source, list[float]] = {source: [0.0] * 4 for source in get_args(Source)}

    def add(self, source: Source, look: Look) -> None:
        sums = self._sums[source]
        sums[0] += look.pauses
        sums[1] += look.stalls
        sums[2] += look.stall_s
        sums[3] += look.consumed

    def collect(self) -> Iterator[CounterMetricFamily]:
        for index, (name, text) in enumerate(self._COUNTERS):
            family = CounterMetricFamily(name, text, labels=["source"])
            for source, sums in self._sums.items():
                family.add_metric([source], sums[index])
            yield family


class _ReaderCollector(Collector):
    """Gauges over the readers of all open streams, by state and by the evidence the estimates rest on."""

    _GAUGES = (
        ("tokenflow_readers", "Readers of open streams."),
        ("tokenflow_reader_buffered_tokens", "Tokens generated and not read yet (estimate)."),
        ("tokenflow_reader_tokens_per_s", "Tokens read per second (estimate); 0 while paused or stalled."),
    )

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._streams = streams

    def collect(self) -> Iterator[GaugeMetricFamily]:
        sums: dict[tuple[str, str], list[float]] = {}
        now = time.monotonic()
        for stream in self._streams:
            if stream.end is None and stream.streaming:
                self._add(stream, sums, now)
        for index, (name, text) in enumerate(self._GAUGES):
            family = GaugeMetricFamily(name, text, labels=["state", "source"])
            for labels, values in sums.items():
                family.add_metric(labels, values[index])
            yield family

    def _add(self, stream: Stream, sums: dict[tuple[str, str], list[float]], now: float) -> None:
        stream.settle()
        estimate = stream.reader.estimate(now)
        values = sums.setdefault((estimate.state, estimate.source), [0.0, 0.0, 0.0])
        values[0] += 1
        values[1] += max(0.0, stream.generated - stream.reader.consumed_tokens(estimate))
        values[2] += estimate.rate if estimate.state == "reading" else 0.0
