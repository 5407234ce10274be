"""What observes requests must not be able to end one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import structlog

__all__ = ["harmless"]

_log = structlog.stdlib.get_logger("tokenflow.telemetry")

P = ParamSpec("P")
T = TypeVar("T")


def harmless(function: Callable[P, T]) -> Callable[P, T | None]:
    """A fault in `function` is logged in full, and its result is None."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Exception:  # noqa: BLE001 - see the module
            _log.exception("fault in telemetry", where=function.__qualname__)
            return None

    return guarded
