"""Something done to a request at an await of one's choice."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Interruptible", "cancel"]


def cancel() -> None:
    """What a server does to the requests that outlast its grace; for `Interruptible.at`."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


class Interruptible:
    """An ASGI application around another one that counts how often the task of a request comes to wait.

    What `at` was given is done at that wait, just before the task is left waiting, so that a cancellation
    reaches the task exactly there. One request at a time is watched.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._acts: dict[int, Callable[[], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.waits: list[str] = []
        """Where in the gateway's code the request waited, since `at`."""
        self.acted = False

    def at(self, *numbers: int, act: Callable[[], None] = lambda: None) -> None:
        """From the next request on, do `act` at the waits with these numbers, counted from 1."""
        self._acts = dict.fromkeys(numbers, act)
        self.waits = []
        self.acted = False

    def cancel(self) -> None:
        """Cancel the request that is under way, wherever it waits."""
        if self._task is not None:
            self._task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._task = asyncio.current_task()
        try:
            await self._watched(self._app(scope, receive, send))  # type: ignore[arg-type]
        finally:
            self._task = None

    @types.coroutine
    def _watched(self, request: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        error: BaseException | None = None
        while True:
            try:
                waits_for = request.send(None) if error is None else request.throw(error)
            except StopIteration:
                return
            self.waits.append(_place(request))
            if act := self._acts.get(len(self.waits)):
                self.acted = True
                act()
            try:
                yield waits_for
                error = None
            except BaseException as thrown:  # noqa: BLE001 - the request's business
                error = thrown


def _place(waiting: Any) -> str:
    """The innermost line of the gateway that a suspended coroutine waits at."""
    place = ""
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None)
        if frame is not None and "tokenflow_gateway" in frame.f_code.co_filename:
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        waiting = getattr(waiting, "cr_await", None)
    return place
