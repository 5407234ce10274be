"""Runs the gateway on uvicorn."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from tokenflow_engine.control.endpoint import EndpointError
from tokenflow_gateway.app import Gateway
from tokenflow_gateway.config import ConfigError, Settings, is_loopback, load_settings
from tokenflow_gateway.http_protocol import BoundedHttpProtocol
from tokenflow_gateway.logs import configure_logging

__all__ = ["serve"]

_log = structlog.stdlib.get_logger("tokenflow.gateway")

_BACKLOG = 2048


def serve(config_file: Path | None, overrides: Mapping[str, Any]) -> int:
    """Run until SIGTERM or Ctrl-C. Returns an exit code: 2 for a configuration that cannot be used."""
    try:
        settings = load_settings(config_file, overrides)
        server = _server(settings)
        listener = _listen(settings)
    except (ConfigError, EndpointError) as error:
        print(f"tokenflow: {error}", file=sys.stderr)  # noqa: T201 - before logging is set up, to a person
        return 2
    configure_logging(settings.log_level, settings.log_format)
    with listener:
        return _run(server, settings, listener)


def _run(server: uvicorn.Server, settings: Settings, listener: socket.socket) -> int:
    _announce(settings, listener)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down in order, and passes the signal on
        server.run(sockets=[listener])
    return 0 if server.started else 1


def _server(settings: Settings) -> uvicorn.Server:
    server: uvicorn.Server
    gateway = Gateway(settings, stopping=lambda: server.should_exit)
    config = uvicorn.Config(
        gateway,
        loop="uvloop",
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
    )
    server = uvicorn.Server(config)
    return server


def _listen(settings: Settings) -> socket.socket:
    """The listening socket, bound before anything else so that a taken port is one clear line."""
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
    listener.listen(_BACKLOG)
    listener.set_inheritable(True)
    return listener


def _announce(settings: Settings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    _log.info("gateway listens", host=host, port=port, engines=[engine.url for engine in settings.engines])
    if not is_loopback(settings.host):
        _log.warning(
            "everyone who reaches this address can use the engines: there are no API keys yet", host=host
        )
