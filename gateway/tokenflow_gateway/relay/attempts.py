"""Another engine for a request whose first one has done nothing for it."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.engines.placement import Wish
from tokenflow_gateway.engines.registry import ANY, EngineRegistry
from tokenflow_gateway.relay.errors import (
    ConnectTimeout,
    EngineFailed,
    EngineUnreachable,
    ModelNotFound,
    NoEngine,
    RelayError,
)

__all__ = ["BUSY", "Attempts", "RetryReason", "retry_reason"]

BUSY = 503
"""Status of an engine that has done nothing for a request."""

RetryReason = Literal["refused", "connect_timeout", "lost", "busy"]
"""``refused``: no connection; ``lost``: the connection broke before the answer; ``busy``: it answered 503,
as its status or as the first event of its stream."""


class Attempts:
    """The engines one request is tried on, one after the other."""

    def __init__(
        self,
        registry: EngineRegistry,
        model: str | None,
        *,
        most: int,
        among: Set[str] | None = None,
        wish: Wish = ANY,
        first: Engine | None = None,
        streams: bool = True,
    ) -> None:
        """`first`: where it has been chosen already; `streams`: see `EngineRegistry.pick`.

        Raises `ModelNotFound` or `NoEngine`.
        """
        self._registry = registry
        self._model = model
        self._most = most
        self._among = among
        self._wish = wish
        self._streams = streams
        self.first = first or registry.pick(model, among=among, wish=wish, streams=streams)
        self._tried = {self.first}

    def another(self) -> Engine | None:
        """One that has not been asked yet, if there is one and it may be asked."""
        if len(self._tried) >= self._most:
            return None
        try:
            engine = self._registry.pick(
                self._model,
                without=self._tried,
                among=self._among,
                wish=self._wish,
                streams=self._streams,
            )
        except (ModelNotFound, NoEngine):
            return None
        self._tried.add(engine)
        return engine


def retry_reason(error: RelayError, *, idle: bool) -> RetryReason | None:
    """Why another engine may be asked after this failure, of which the client has seen nothing.

    Without a connection nothing was sent. A request that was sent may have been worked on, and is asked again
    only if the engine is known to have done nothing lasting for it (`idle`).
    """
    if isinstance(error, ConnectTimeout):
        return "connect_timeout"
    if isinstance(error, NoEngine):
        return "refused"
    if isinstance(error, EngineFailed) and error.status == BUSY and idle:
        return "busy"
    return "lost" if isinstance(error, EngineUnreachable) and idle else None
