"""Watching over engine and gateway: ready together, restarted, ended together."""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.progress import Progress
from tokenflow_gateway.local.restarts import RestartBudget
from tokenflow_gateway.local.service import Service

__all__ = ["stop_all", "wait_until_ready", "watch"]

POLL_S = 0.3
GATEWAY_AFTER_ENGINE_S = 60.0
"""How long the gateway may take to see an engine that is ready."""


def wait_until_ready(engine: Service, gateway: Service, *, note: Callable[[str], None]) -> None:
    """Wait as long as both live; once the engine is ready the gateway must follow soon."""
    _wait_for(engine, [engine, gateway], note=note, timeout_s=None)
    _wait_for(gateway, [engine, gateway], note=note, timeout_s=GATEWAY_AFTER_ENGINE_S)


def _wait_for(
    service: Service, living: list[Service], *, note: Callable[[str], None], timeout_s: float | None
) -> None:
    started_at = time.monotonic()
    while not service.is_ready():
        for each in living:
            each.require_running()
        if timeout_s is not None and time.monotonic() - started_at > timeout_s:
            raise SetupError(f"The {service.name} is not ready after {timeout_s:.0f} s: see {service.log}")
        note(f"waiting for the {service.name}")
        time.sleep(POLL_S)


def watch(engine: Service, gateway: Service, *, progress: Progress) -> None:
    """Start the engine again when it dies; raise `SetupError` if that is no help, or if the gateway dies."""
    budget = RestartBudget()
    away = False
    while True:
        gateway.require_running()
        code = engine.exit_code()
        if code is not None:
            _restart(engine, code=code, budget=budget, progress=progress)
            away = True
        elif away and engine.is_ready():
            progress.say("The engine is back.")
            away = False
        time.sleep(POLL_S)


def _restart(engine: Service, *, code: int, budget: RestartBudget, progress: Progress) -> None:
    pause_s = budget.spend(time.monotonic())
    if pause_s is None:
        raise SetupError(f"The engine keeps ending: no further restart. {engine.obituary(code)}")
    progress.say(
        f"The engine ended with code {code} (see {engine.log}): starting it again in {pause_s:.0f} s"
    )
    time.sleep(pause_s)
    engine.start()


def stop_all(services: list[Service]) -> None:
    """All are asked at once, so that the graces run side by side."""
    for service in services:
        service.terminate()
    for service in services:
        service.stop()
