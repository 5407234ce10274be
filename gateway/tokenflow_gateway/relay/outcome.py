"""How a stream ended: for the engine, for its client, and in the log."""

from __future__ import annotations

import logging

import msgspec
import structlog

from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.relay.errors import (
    ClientTooSlow,
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    NoEngine,
    RelayError,
    ShuttingDown,
    StreamTruncated,
    TotalTimeout,
)
from tokenflow_gateway.relay.stream import End, Stream

__all__ = ["Outcome", "log_end"]

_LOG_NAME = "tokenflow.relay"
_log = structlog.stdlib.get_logger(_LOG_NAME)
_levels = logging.getLogger(_LOG_NAME)


class Outcome(msgspec.Struct):
    """How a stream ended, what the client has yet to be told of it, and who is asked instead."""

    end: End = "failed"
    error: RelayError | None = None
    next: Engine | None = None
    untold: bool = False
    """The engine has worked on it out of sight, and has not said how much."""

    def failed(self, error: RelayError) -> None:
        self.end, self.error, self.next = _end_of(error), error, None


_ENDS: tuple[tuple[type[RelayError], End], ...] = (
    (ShuttingDown, "shutdown"),
    (ClientTooSlow, "client_too_slow"),
    (TotalTimeout, "total_timeout"),
    (EngineTimeout, "engine_timeout"),
    (StreamTruncated, "truncated"),
    (EngineFailed, "engine_error"),
    (EngineRefused, "refused"),
    (NoEngine, "engine_lost"),
    (EngineUnreachable, "engine_lost"),
)


def _end_of(error: RelayError) -> End:
    return next((end for kind, end in _ENDS if isinstance(error, kind)), "engine_error")


_IN_ORDER = frozenset({"finished", "refused", "client_gone"})


def log_end(stream: Stream, outcome: Outcome) -> None:
    level = logging.INFO if outcome.end in _IN_ORDER else logging.WARNING
    if not _levels.isEnabledFor(level):  # before anything is put together for it
        return
    _log.log(
        level,
        "stream ended",
        rid=stream.rid,
        request_id=stream.request_id,
        tenant=stream.tenant,
        key=stream.grant.key_id,
        sla=stream.grant.sla.name,
        route=stream.route,
        model=stream.model,
        engine=stream.engine.name,
        end=outcome.end,
        error=outcome.error and outcome.error.message,
        next=outcome.next and outcome.next.name,
        ttft_s=stream.ttft_s and round(stream.ttft_s, 4),
        delivered=stream.delivered,
        generated=stream.generated,
        **({} if stream.trace is None else {"trace_id": stream.trace.trace_id}),
    )
