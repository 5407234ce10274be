"""Ends a request's task when its client leaves or a phase of it takes too long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from starlette.types import Receive

from tokenflow_gateway.relay.errors import EngineTimeout, FirstByteTimeout, TotalTimeout

if TYPE_CHECKING:
    from tokenflow_gateway.relay.exchange import ClientConnection

__all__ = ["ClientGone", "RequestGuard", "TotalTime"]


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class TotalTime:
    """What one request may take from its arrival to its end."""

    __slots__ = ("until", "within_s")

    def __init__(self, within_s: float | None, *, arrived: float) -> None:
        """`arrived` by the event loop's clock."""
        self.within_s = within_s
        self.until = math.inf if within_s is None else arrived + within_s

    def expired(self) -> TotalTimeout:
        assert self.within_s is not None
        return TotalTimeout.after(self.within_s)


class RequestGuard:
    """Context manager around one request, entered once its body has been read.

    Interrupts the task that entered it, at whatever it awaits, and turns that into `ClientGone`, an
    `EngineTimeout` or, whatever it is that is waited for, a `TotalTimeout`. A deadline is an attribute store
    (`expect`, `hold`), so it can move with every chunk; the timer re-arms itself when it fires early.
    """

    def __init__(
        self,
        receive: Receive,
        total: TotalTime | None = None,
        connection: ClientConnection | None = None,
    ) -> None:
        """That the client leaves is told by its `connection`, or else looked for in a task, by `receive`."""
        self._receive = receive
        self._connection = connection
        self._watcher: asyncio.Task[None] | None = None
        self._over = False
        self._loop = asyncio.get_running_loop()
        self._total = total or TotalTime(None, arrived=0.0)
        self._deadline = math.inf
        self._within_s = math.inf
        self._late: type[EngineTimeout] = FirstByteTimeout
        self._interrupt: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = math.inf
        self.settle: Callable[[], None] = lambda: None
        """Called before the engine is found late: what has come may not have been told yet."""

    def expect(self, within_s: float, late: type[EngineTimeout], *, since: float | None = None) -> None:
        """The engine has `within_s` seconds from now, or `since` then, and `late` is what it is otherwise."""
        self._late = late
        self._within_s = within_s
        self._deadline = deadline = (self._loop.time() if since is None else since) + within_s
        if self._fires_at > deadline:
            self._arm()

    def hold(self) -> float:
        """It is not the engine that is waited for now. Returns the deadline it had, for `resume`."""
        deadline, self._deadline = self._deadline, math.inf
        return deadline

    def resume(self, deadline: float) -> None:
        """The engine is waited for again, and what has come from it was no progress."""
        self._deadline = deadline
        if self._fires_at > deadline:
            self._arm()

    async def __aenter__(self) -> RequestGuard:
        self.enter()
        return self

    def enter(self) -> None:
        """What entering the context does."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task = task
        if self._connection is not None:
            self._connection.watch(self._client_has_left)
        else:
            self._watcher = self._loop.create_task(self._watch_client())
        if self._total.until < math.inf:
            self._arm()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._over = True
        ours = self._interrupt is not None and kind is asyncio.CancelledError and self._task.uncancel() == 0
        if self._connection is not None:
            self._connection.watch(None)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait((self._watcher,))
        if ours and self._interrupt is not None:
            raise self._interrupt from error

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_has_left()

    def _client_has_left(self) -> None:
        self._stop(ClientGone())

    @property
    def _next(self) -> float:
        """When to look again."""
        return min(self._deadline, self._total.until)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = self._next
        self._timer = self._loop.call_at(self._fires_at, self._fire)

    def _fire(self) -> None:
        self._timer, self._fires_at = None, math.inf
        self.settle()
        now = self._loop.time()
        if self._total.until <= now:
            self._stop(self._total.expired())
        elif self._deadline <= now:
            self._stop(self._late.after(self._within_s))
        elif self._next < math.inf:
            self._arm()

    def _stop(self, interrupt: Exception) -> None:
        if self._interrupt is None and not self._over:
            self._interrupt = interrupt
            self._task.cancel()
