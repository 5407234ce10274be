"""Ends a request's task when its client leaves or its engine takes too long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive

from tokenflow_gateway.relay.errors import EngineTimeout

__all__ = ["ClientGone", "RequestGuard"]


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class RequestGuard:
    """Context manager around one request, entered once its body has been read.

    Interrupts the task that entered it, at whatever it awaits, and turns that into `ClientGone` or
    `EngineTimeout`. A deadline is an attribute store (`expect`, `hold`), so it can move with every chunk;
    its one timer re-arms itself only when it fires early.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._deadline = math.inf
        self._on_expiry: Callable[[], Exception] = lambda: EngineTimeout("the engine took too long")
        self._interrupt: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, within_s: float, phase: str) -> None:
        """The engine has `within_s` seconds from now to do what `phase` names."""
        self._deadline = self._loop.time() + within_s
        self._on_expiry = lambda: EngineTimeout(f"the engine sent {phase} within {within_s:g} s")
        if self._timer is None or self._timer.when() > self._deadline:
            self._arm()

    def extend(self, by_s: float) -> None:
        """Progress was made: the deadline is `by_s` seconds from now, and not before the one that was set."""
        self._deadline = self._loop.time() + by_s
        if self._timer is None:
            self._arm()

    def hold(self) -> None:
        """It is not the engine that is waited for now."""
        self._deadline = math.inf

    async def __aenter__(self) -> RequestGuard:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = self._loop.create_task(self._watch_client())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._watcher.cancel()
        ours = self._interrupt is not None and kind is asyncio.CancelledError and self._task.uncancel() == 0
        await asyncio.wait((self._watcher,))
        if ours and self._interrupt is not None:
            raise self._interrupt from error

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._stop(ClientGone())

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._deadline <= self._loop.time():
            self._stop(self._on_expiry())
        elif self._deadline < math.inf:
            self._arm()

    def _stop(self, interrupt: Exception) -> None:
        if self._interrupt is None:
            self._interrupt = interrupt
            self._task.cancel()
