"""Runs the gateway on uvicorn."""

from __future__ import annotations

import contextlib
import errno
import gc
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from tokenflow_engine.control.endpoint import EndpointError, runtime_dir
from tokenflow_gateway.app import Gateway
from tokenflow_gateway.config import ConfigError, Settings, is_loopback, load_settings
from tokenflow_gateway.http_protocol import SPARE_CONNECTIONS, BoundedHttpProtocol, GatewayState
from tokenflow_gateway.logs import configure_logging
from tokenflow_gateway.reload import merged
from tokenflow_gateway.shutdown import StagedServer
from tokenflow_gateway.tenants.keyring import Keyring
from tokenflow_gateway.tenants.rules import Rules
from tokenflow_gateway.workers.supervisor import Supervisor
from tokenflow_gateway.workers.worker import Worker

__all__ = ["serve", "server_for"]

_log = structlog.stdlib.get_logger("tokenflow.gateway")

_GC_THRESHOLDS = (2_000, 1, 100)
"""Requests leave few cycles, and all streams wait while they are looked for: among the youngest objects less
often than Python's 700, among those that outlive that while they are few, and among all, which takes tens of
milliseconds, seldom."""
_FILES_PER_CONNECTION = 2
"""Its own, and that of the engine's connection that answers it."""
_OTHER_FILES = 192 + SPARE_CONNECTIONS
"""Libraries, logs, links, health probes, kept connections of engines."""


def serve(config_file: Path | None, overrides: Mapping[str, Any]) -> int:
    """Run until SIGTERM or Ctrl-C. Returns an exit code: 2 for a configuration that cannot be used."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is somebody who can reload
    load = partial(load_settings, config_file, overrides)
    try:
        settings = load()
        server = server_for(settings, load=load)
        listener = _listen(settings)
    except (ConfigError, EndpointError) as error:
        print(f"tokenflow: {error}", file=sys.stderr)  # noqa: T201 - before logging is set up, to a person
        return 2
    configure_logging(settings.log_level, settings.log_format)
    with listener:
        _announce(settings, listener, server.server_state.max_connections)
        if settings.workers == 1:
            return _run(server, listener)
        del server  # it has shown that the settings can be used
        with tempfile.TemporaryDirectory(prefix="w-", dir=runtime_dir()) as folder:
            crew = Worker.crew(settings.workers, Path(folder))
            current = _Current(settings, load)
            return Supervisor(
                settings.workers,
                lambda index: _run(server_for(current.settings, crew[index], load=load), listener),
                on_hangup=current.reload,
            ).run()


class _Current:
    """The settings that a worker starts with."""

    def __init__(self, settings: Settings, load: Callable[[], Settings]) -> None:
        self.settings = settings
        self._load = load

    def reload(self) -> bool:
        """Whether the workers have something to take over: each of them loads it anew, and says so."""
        try:
            settings, _ = merged(self.settings, self._load())
            Rules(settings, Keyring())
        except ConfigError as error:
            _log.error("the configuration is not valid, and nothing has changed", reason=str(error))
            return False
        self.settings = settings
        return True


def _run(server: StagedServer, listener: socket.socket) -> int:
    gc.collect()
    gc.freeze()  # what is imported stays: a full collection would look at it for 100 ms, and all streams wait
    gc.set_threshold(*_GC_THRESHOLDS)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down in order, and passes the signal on
        server.run(sockets=[listener])
    return 0 if server.started else 1


def server_for(
    settings: Settings,
    worker: Worker | None = None,
    *,
    load: Callable[[], Settings] | None = None,
) -> StagedServer:
    """The gateway, or one worker of it, on its server, as it is to run. Raises `ConfigError`."""
    server: StagedServer
    gateway = Gateway(settings, worker=worker, stopping=lambda: server.should_exit, load=load)
    config = uvicorn.Config(
        gateway,
        loop="uvloop",
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the other end of the connection is who it is: see `trusted_proxies`
        date_header=False,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
    )
    state = GatewayState(
        max_connections=_connections_within_limit(_connections_of_each(settings)),
        max_hold_s=settings.delivery.max_hold_s,
        on_refused=gateway.metrics.connections_refused.inc,
        on_request=gateway.coalescing.hold_off,
    )
    gateway.metrics.watch_connections(lambda: len(state.connections))
    server = StagedServer(config, state)
    return server


def _connections_of_each(settings: Settings) -> int:
    """A worker's share, rounded up."""
    return -(-settings.max_connections // settings.workers)


def _connections_within_limit(wanted: int) -> int:
    """As many as the limit of open files has room for; it is raised first, as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted * _FILES_PER_CONNECTION + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    return max(1, (soft - _OTHER_FILES) // _FILES_PER_CONNECTION)


def _listen(settings: Settings) -> socket.socket:
    """The socket to listen on, bound before anything else so that a taken port is one clear line.

    uvicorn listens once the gateway can answer: until then connections are refused, and proxies ask another.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"host: {settings.host!r} is no address of this machine ({error.strerror})"
        ) from error
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host: {settings.host!r} is no address of this machine") from error
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "stop what uses it, or choose another with --port or TOKENFLOW_PORT"
        ) from error
    listener.set_inheritable(True)
    return listener


def _announce(settings: Settings, listener: socket.socket, max_connections: int) -> None:
    host, port = listener.getsockname()[:2]
    _log.info(
        "gateway listens",
        host=host,
        port=port,
        engines=[engine.url for engine in settings.engines],
        workers=settings.workers,
    )
    if not is_loopback(settings.host) and settings.anonymous == "allow":
        _log.warning("everyone who reaches this address can use the engines: anonymous is allowed", host=host)
    if max_connections < _connections_of_each(settings):
        _log.warning(
            "fewer connections than max_connections, for want of open files (ulimit -n)",
            connections=max_connections * settings.workers,
        )
