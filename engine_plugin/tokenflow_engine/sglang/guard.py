"""Nothing of ours may take the engine down: every hook runs inside `guarded`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from itertools import cycle, repeat
from typing import Any

from tokenflow_engine.control.ratelimit import Occasionally

__all__ = ["InjectedFault", "errors_caught", "guarded"]

_logger = logging.getLogger(__name__)
_log = Occasionally(every_s=10.0)
_caught = 0


class InjectedFault(RuntimeError):
    """Raised in the hooks named by ``TOKENFLOW_FAULT`` (comma-separated), to test the guard."""


def errors_caught() -> int:
    """Errors of our own code that were caught in this process."""
    return _caught


def guarded(
    name: str, *, on_failure: Callable[[str, int], None] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a BEFORE or AFTER hook: what it raises is counted and logged, and the engine goes on as stock.

    A hook that failed returns None, which for both kinds means "leave the engine's own behaviour".
    `on_failure` is told the hook's name and how many of its calls in a row have failed; it must not raise.
    """

    def decorate(hook: Callable[..., Any]) -> Callable[..., Any]:
        strikes = _strikes(name)
        failed_in_a_row = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal failed_in_a_row
            try:
                if next(strikes):
                    raise InjectedFault(f"TOKENFLOW_FAULT is set for {name!r}")
                result = hook(*args, **kwargs)
            except Exception:  # noqa: BLE001 - an exception that leaves a hook kills the server
                failed_in_a_row += 1
                _record(name)
                if on_failure is not None:
                    on_failure(name, failed_in_a_row)
                return None
            failed_in_a_row = 0
            return result

        return run

    return decorate


def _record(name: str) -> None:
    global _caught
    _caught += 1
    line = f"TokenFlow: an error in hook {name!r} was caught; the engine goes on without it"
    _log.log(_logger, name, line, exc_info=True)


def _strikes(name: str) -> Iterator[bool]:
    """Which calls of a hook are to fail: each if it is named (or ``all``), every n-th for ``name/n``."""
    for fault in os.environ.get("TOKENFLOW_FAULT", "").split(","):
        hook, _, every = fault.partition("/")
        if hook in (name, "all"):
            return cycle([True] + [False] * (int(every or 1) - 1))
    return repeat(False)
