"""Logs as `tokenflow serve` writes them, in a test's own process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from tokenflow_gateway.logs import configure_logging

__all__ = ["logging_as_served"]


@contextmanager
def logging_as_served(level: str = "info") -> Iterator[None]:
    """JSON to standard error, which is to be captured already.

    Loggers are not cached: those that this block has used would stay so for all tests to come.
    """
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level_before = root.handlers, root.level
    configure_logging(level, "json")
    structlog.configure(cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)
        root.handlers = handlers
        root.setLevel(level_before)
