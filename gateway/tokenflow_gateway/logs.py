"""Structured logs: one JSON object a line (or plain text for a terminal), never prompt or answer text."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

__all__ = ["configure_level", "configure_logging"]


def configure_level(level: str) -> None:
    """Log what is of this level or above from now on."""
    logging.getLogger().setLevel(level.upper())


def configure_logging(level: str, fmt: Literal["json", "console"]) -> None:
    """Send structlog's and the standard library's records to standard error in one format."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if fmt == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            renderer,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    configure_level(level)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per health probe says nothing
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
