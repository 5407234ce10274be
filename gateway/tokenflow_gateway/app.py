"""The gateway as one ASGI application: the relay for ``/v1/*``, the control app for the rest."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import httpx
import structlog
import zmq
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenflow_engine.control.endpoint import default_endpoint, link_secret
from tokenflow_gateway.api.control import control_app
from tokenflow_gateway.api.progress import ProgressRoute, stream_of
from tokenflow_gateway.config import ConfigError, EngineConfig, Settings, is_loopback
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.engines.placement import Placement
from tokenflow_gateway.engines.probe import PROBE_TIMEOUT_S, HealthProbe
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.fleet import Fleet
from tokenflow_gateway.lifecycle import Lifecycle
from tokenflow_gateway.link.client import EngineLink, LinkIdentity
from tokenflow_gateway.link.feed import ReaderFeed
from tokenflow_gateway.logs import configure_level
from tokenflow_gateway.metrics import Metrics
from tokenflow_gateway.readers.connection import ConnectionSweep
from tokenflow_gateway.readers.registry import ReaderRegistry
from tokenflow_gateway.readers.track import Watched
from tokenflow_gateway.relay.asking import Asking
from tokenflow_gateway.relay.coalescing import ReadCoalescing
from tokenflow_gateway.relay.entry import Entry
from tokenflow_gateway.relay.errors import error_body
from tokenflow_gateway.relay.exchange import SEEN
from tokenflow_gateway.relay.generation import Generations
from tokenflow_gateway.relay.relay import Relay
from tokenflow_gateway.relay.routes import methods_of
from tokenflow_gateway.relay.stream import StreamTable
from tokenflow_gateway.relay.upstream import Upstream
from tokenflow_gateway.reload import Reloader, merged
from tokenflow_gateway.store.sqlite import StoreError
from tokenflow_gateway.tenants.budgets import spenders
from tokenflow_gateway.tenants.keyring import Keyring, KeyWatch
from tokenflow_gateway.tenants.metrics import TenantLabels, TenantMetrics
from tokenflow_gateway.tenants.rules import Rules
from tokenflow_gateway.tenants.usage import UsageLog
from tokenflow_gateway.workers.peers import Forwarded, Lesson, PeerServer, Question, Wanted
from tokenflow_gateway.workers.views import OwnViews, Views
from tokenflow_gateway.workers.worker import Worker

if TYPE_CHECKING:
    from tokenflow_gateway.telemetry.telemetry import Telemetry

__all__ = ["Gateway", "kept_running"]

_log = structlog.stdlib.get_logger("tokenflow.gateway")

RESTART_AFTER_S = 1.0
_TOLD_WITHIN_S = 1.0
"""For the engines to hear of the streams that the gateway's own end has ended."""
_REPORTS_S = 10.0
"""For a client to send its progress reports, which are short."""
_HOST = re.compile(rb"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:\d+)?")
_WRONG_HOST = (
    "this gateway listens on loopback and answers to loopback names only; "
    "set host to open it under another name"
)


class Gateway:
    """The application. Its lifespan owns every task and connection."""

    def __init__(
        self,
        settings: Settings,
        *,
        worker: Worker | None = None,
        stopping: Callable[[], bool] = lambda: False,
        load: Callable[[], Settings] | None = None,
    ) -> None:
        """`worker`: which of several processes this is. `load`: the settings anew, at each SIGHUP."""
        self._worker = worker = worker or Worker.alone()
        self.settings = settings
        self._stopping = stopping
        self._load = load
        self._keyring = Keyring()
        self.keys = KeyWatch(self._keyring, settings.state)
        self._rules = Rules(settings, self._keyring)
        try:
            self.keys.load()
        except StoreError as error:
            raise ConfigError(f"state_dir: {error}") from error
        self.metrics = Metrics()
        self.coalescing = ReadCoalescing(settings.coalesce_ms / 1000)
        self.streams = StreamTable()
        self.registry = EngineRegistry(
            [Engine(config) for config in settings.engines],
            placement=Placement(engine_queue=settings.admission.engine_queue),
        )
        self.metrics.watch(self.registry, self.streams)
        labels = TenantLabels(settings.tenants, most=settings.metric_tenants)
        self._tenant_metrics = TenantMetrics(self.metrics.registry, self.metrics.sums, labels)
        self._tenant_metrics.watch(self.metrics.registry, self.streams)
        name = settings.gateway_id or f"{socket.gethostname()}:{settings.host}:{settings.port}"
        self._identity = LinkIdentity(
            gateway_id=worker.gateway_id(name),
            incarnation=f"{os.getpid()}-{uuid.uuid4().hex[:8]}",
            secret=settings.link_secret.get_secret_value() if settings.link_secret else link_secret(),
        )
        member = f"{self._identity.gateway_id}/{self._identity.incarnation}"
        self.fleet = Fleet(
            settings,
            self.registry,
            self.metrics,
            self._keyring,
            worker,
            member=member,
            secret=self._identity.secret,
            spenders=lambda: spenders(self._rules.access.roster, self._keyring),
        )
        self._capabilities = self.fleet.capabilities
        self.readers = ReaderRegistry(
            learned=self.fleet.learned, count=self.metrics.reader_looked_at, tell=self.fleet.tell_lesson
        )
        self._progress = ProgressRoute(
            self.streams,
            self.readers,
            self._capabilities,
            self.metrics,
            self.fleet.owners,
            body_s=min(settings.timeouts.body_s, _REPORTS_S),
        )
        self.fleet.answer_reports(self._progress.forwarded)
        self._own = OwnViews(worker, self.registry, self.streams, self.metrics, stopping)
        self._control: ASGIApp = control_app(
            lambda: self._rules.access,
            self.registry,
            Views(worker, self._own, self.fleet.peers),
            self.fleet.draining,
        )
        self._public: ASGIApp = self._dispatch
        if settings.cors_origins:
            self._public = CORSMiddleware(
                self._dispatch,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[
                    "X-TokenFlow-Stream",
                    "X-TokenFlow-SLA",
                    "X-TokenFlow-Reduced",
                    "X-TokenFlow-Reason",
                    "X-Should-Retry",
                    "Retry-After",
                    "Retry-After-Ms",
                    "X-RateLimit-Limit-Requests",
                    "X-RateLimit-Remaining-Requests",
                    "X-RateLimit-Reset-Requests",
                    "X-RateLimit-Limit-Tokens",
                    "X-RateLimit-Remaining-Tokens",
                    "X-RateLimit-Reset-Tokens",
                    "X-Request-ID",
                ],
            )
        self._relay: Relay | None = None
        self._relay_under: Callable[[Rules], Relay] | None = None
        self._usage = self._usage_log(member) if settings.usage.record else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http" and self._refuses_host(scope):
            refusal = error_body(_WRONG_HOST, status=403)
            await Response(refusal, 403, media_type="application/json")(scope, receive, send)
        elif scope["type"] == "http" and (rid := stream_of(scope["path"])) is not None:
            response = await self._progress.answer(rid, Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self._public(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_relayed(scope):
            if scope["method"] == "OPTIONS" and (allowed := methods_of(scope["path"])):
                await Response(status_code=204, headers={"Allow": ", ".join(allowed)})(scope, receive, send)
                return
            assert self._relay is not None, "requests come after the lifespan's startup"
            await self._relay(scope, receive, send)
        else:
            await self._control(scope, receive, send)

    def _refuses_host(self, scope: Scope) -> bool:
        """Whether a web page may have led its visitor here by rebinding a name of its own to loopback.

        Checked while the gateway listens on loopback only: there, no other name is a right one.
        """
        if SEEN in scope.get("extensions", ()) or not is_loopback(self.settings.host):
            return False  # a request with this head has been let in
        named = False
        for name, value in scope["headers"]:
            if name == b"host":
                if named or not _names_loopback(value):
                    return True
                named = True
        return False

    def reload(self, settings: Settings) -> list[str]:
        """Serve by these settings from the next request on; streams that run keep what they began with.

        Returns the names of settings that need a restart. Raises `ConfigError`, and nothing has changed then.
        """
        settings, waiting = merged(self.settings, settings)
        rules = Rules(settings, self._keyring)
        self.settings, self._rules = settings, rules
        self.fleet.update(settings)
        if self._relay_under is not None:
            self._relay = self._relay_under(rules)
        configure_level(settings.log_level)
        return waiting

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything that lives as long as the gateway: connections, health probes and links."""
        upstream = Upstream(self.coalescing)
        lifecycle = Lifecycle(self.streams, self.readers, self.metrics, upstream)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as probe_client:
            probes = {engine: HealthProbe(engine, probe_client) for engine in self.registry}
            links = self._links(lifecycle, context)
            telemetry = self._telemetry()

            def relay_under(rules: Rules) -> Relay:
                settings = rules.settings
                asking = Asking(
                    upstream=upstream,
                    registry=self.registry,
                    metrics=self.metrics,
                    max_attempts=settings.max_attempts,
                    on_engine_failure=lambda engine: probes[engine].suspect(),
                )
                entry = Entry(
                    limits=self.fleet.limits,
                    admission=self.fleet.admission,
                    asking=asking,
                    roster=rules.access.roster,
                    estimates=settings.estimates,
                )
                return Relay(
                    settings=settings,
                    access=rules.access,
                    timeouts=rules.timeouts,
                    asking=asking,
                    entry=entry,
                    generations=Generations(
                        settings=settings,
                        asking=asking,
                        readers=self.readers,
                        lifecycle=lifecycle,
                        metrics=self.metrics,
                        capabilities=self._capabilities,
                        names=self.fleet.names,
                        roster=rules.access.roster,
                        entry=entry,
                    ),
                    names=self.fleet.names,
                    metrics=self.metrics,
                    stopping=self._stopping,
                    telemetry=telemetry,
                )

            self._relay_under = relay_under
            self._relay = relay_under(self._rules)
            lifecycle.on_settled.append(self._tenant_metrics.settled)
            if self._usage is not None:
                lifecycle.on_settled.append(self._usage.ended)
                self.readers.on_done = self._usage.read_on
                self._usage.start()
            lifecycle.on_settled.append(lambda _stream: self.fleet.admission.changed())
            await asyncio.gather(self.fleet.start(), *(probe.probe() for probe in probes.values()))
            self._progress.on_change = lifecycle.reader_changed
            sweep = ConnectionSweep(self.streams, lifecycle.reader_changed)
            parts: list[HealthProbe | EngineLink | ReaderFeed | ConnectionSweep | KeyWatch | Reloader] = [
                self.keys,
                *probes.values(),
                *links,
                lifecycle.feed,
                sweep,
            ]
            if self._load is not None:
                parts.append(Reloader(self._load, self.reload, self.fleet.remember_spent))
            runs = [*(part.run for part in parts), *self.fleet.parts]
            try:
                async with self._answering_peers():
                    await self.fleet.begin()
                    tasks = [asyncio.create_task(kept_running(run)) for run in runs]
                    try:
                        yield
                    finally:
                        await lifecycle.told(within_s=_TOLD_WITHIN_S)
                        await self.fleet.aclose()
                        await _cancelled(tasks)
            finally:
                await lifecycle.aclose()
                self._own.keep_counters()
                if self._usage is not None:
                    await self._usage.aclose()
                await upstream.close()
                context.destroy(linger=0)
                if telemetry is not None:
                    await telemetry.aclose()

    def _usage_log(self, member: str) -> UsageLog:
        dropped = self.metrics.usage_dropped.inc
        return UsageLog(self.settings.state, self.settings.usage, writer=member, on_dropped=dropped)

    def _telemetry(self) -> Telemetry | None:
        if self.settings.telemetry.otlp_endpoint is None:
            return None
        from tokenflow_gateway.telemetry.exporting import open_telemetry  # an extra, which need not be there

        return open_telemetry(self.settings.telemetry, gateway_id=self._identity.gateway_id)

    def _answering_peers(self) -> AbstractAsyncContextManager[None]:
        if self._worker.is_alone:
            return nullcontext()
        return PeerServer(self._worker, self._answer_peer).listening()

    def _answer_peer(self, question: Question) -> Any:
        if isinstance(question, Forwarded):
            return self._progress.forwarded(question)
        if isinstance(question, Lesson):
            watched = Watched(ratio=question.ratio, seconds=question.seconds)
            return self.readers.taught(question.name, watched, now=time.monotonic())
        if isinstance(question, Wanted):
            return self._own.show(question.view)
        return self.fleet.answer(question)

    def _links(self, lifecycle: Lifecycle, context: zmq.Context[zmq.Socket[bytes]]) -> list[EngineLink]:
        links = []
        for engine in self.registry:
            endpoint = _endpoint(engine.config)
            if endpoint is None:
                engine.link_reason = "no link configured"
                continue
            link = EngineLink(engine, endpoint, self._identity, lifecycle, context=context)
            lifecycle.attach(engine, link)
            links.append(link)
        return links


def _hostname(host: bytes) -> str:
    """The name in a `Host` header, without its port."""
    match = _HOST.fullmatch(host.strip())
    return match["name"].decode().strip("[]").lower() if match else ""


@lru_cache(maxsize=256)
def _names_loopback(host: bytes) -> bool:
    return is_loopback(_hostname(host))


def _is_relayed(scope: Scope) -> bool:
    if scope["type"] != "http":
        return False
    path: str = scope["path"]
    if path == "/v1/models" or path.startswith("/v1/models/"):
        return False
    return path.startswith("/v1/")


def _endpoint(config: EngineConfig) -> str | None:
    """The endpoint to link to: the configured one, or the local one of an engine on this machine."""
    if config.link is not None:
        return None if config.link == "off" else config.link
    url = httpx.URL(config.url)
    if not is_loopback(url.host):
        return None
    return default_endpoint(url.port or (443 if url.scheme == "https" else 80))


async def kept_running(run: Callable[[], Awaitable[None]]) -> None:
    """Run a background part until cancelled: a fault of ours is logged in full, and the part begun anew."""
    while True:
        try:
            await run()
        except Exception:  # noqa: BLE001 - a probe or feed that died in silence would leave stale views
            _log.exception("fault in a background task")
        await asyncio.sleep(RESTART_AFTER_S)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
