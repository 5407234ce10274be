"""Nothing of ours may take the engine down: every hook runs inside `guarded`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from tokenflow_engine.control.ratelimit import Occasionally

__all__ = ["errors_caught", "guarded"]

_logger = logging.getLogger(__name__)
_log = Occasionally(every_s=10.0)
_caught = 0


class InjectedFault(RuntimeError):
    """Raised in the hooks named by ``TOKENFLOW_FAULT`` (comma-separated; ``all``), to test the guard."""


def errors_caught() -> int:
    """Errors of our own code that were caught in this process."""
    return _caught


def guarded(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a BEFORE or AFTER hook: what it raises is counted and logged, and the engine goes on as stock.

    A hook that failed returns None, which for both kinds means "leave the engine's own behaviour".
    """

    def decorate(hook: Callable[..., Any]) -> Callable[..., Any]:
        is_faulty = _is_faulty(name)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                if is_faulty:
                    raise InjectedFault(f"TOKENFLOW_FAULT is set for {name!r}")
                return hook(*args, **kwargs)
            except Exception:  # noqa: BLE001 - an exception that leaves a hook kills the server
                _record(name)
                return None

        return run

    return decorate


def _record(name: str) -> None:
    global _caught
    _caught += 1
    line = f"TokenFlow: an error in hook {name!r} was caught; the engine goes on without it"
    _log.log(_logger, name, line, exc_info=True)


def _is_faulty(name: str) -> bool:
    faults = os.environ.get("TOKENFLOW_FAULT", "").split(",")
    return name in faults or "all" in faults
