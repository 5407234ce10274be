"""A new configuration for a gateway that runs: SIGHUP, and what can change without a restart."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from tokenflow_gateway.config import ConfigError, Settings
from tokenflow_gateway.tenants.settings import check_names

__all__ = ["RELOADED", "Reloader", "merged"]

_log = structlog.stdlib.get_logger("tokenflow.config")

RELOADED: Final = frozenset(
    {
        "admin_token",
        "admission",
        "anonymous",
        "classes",
        "delivery",
        "estimates",
        "keep_alive",
        "log_level",
        "max_attempts",
        "max_body_bytes",
        "max_event_bytes",
        "routes",
        "tenants",
        "timeouts",
        "trusted_proxies",
        "user_header",
    }
)
"""Settings that hold for the next request after a reload. All others stay until the next start."""


def merged(old: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """The settings from now on, and the names of those that have changed and need a restart.

    Raises `ConfigError` if what changes now needs what changes later: an engine that is not there yet.
    """
    waiting = [
        name
        for name in Settings.model_fields
        if name not in RELOADED and getattr(old, name) != getattr(new, name)
    ]
    changes = {name: getattr(new, name) for name in RELOADED}
    try:
        check_names(new.classes, new.tenants, {engine.name for engine in old.engines})
    except ValueError as error:
        raise ConfigError(f"{error}; engines change at the next start") from error
    return old.model_copy(update=changes), waiting


class Reloader:
    """Reads the configuration again when it is told to. A file that cannot be used changes nothing."""

    def __init__(
        self,
        load: Callable[[], Settings],
        apply: Callable[[Settings], list[str]],
        then: Callable[[], Awaitable[None]],
    ) -> None:
        """`load` and `apply` raise `ConfigError`; `apply` returns what needs a restart; `then` is next."""
        self._load = load
        self._apply = apply
        self._then = then
        self._asked = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled. Needs the main thread, whose signals it takes."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._asked.set)
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                await self.reload()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the last one may come late

    async def reload(self) -> bool:
        """Once, now. Returns whether the configuration could be used."""
        try:
            waiting = self._apply(await asyncio.to_thread(self._load))
        except ConfigError as error:
            _log.error("the configuration is not valid, and nothing has changed", reason=str(error))
            return False
        await self._then()
        _log.info("configuration reloaded")
        if waiting:
            _log.warning("these settings change at the next start only", settings=waiting)
        return True
