"""Something for a client, and for the proxies before it, to hear while there is nothing to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from types import TracebackType
from typing import cast, get_args

import structlog

from tokenflow_gateway.config import KeepAliveForm, KeepAliveSettings
from tokenflow_gateway.relay.answer import EventHead
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.dialects import Dialect
from tokenflow_gateway.relay.errors import BadRequest
from tokenflow_gateway.relay.stream import Stream

__all__ = ["KeepAlive", "read_keep_alive"]

_log = structlog.stdlib.get_logger("tokenflow.relay")

_COMMENT = b": ping\n\n"


def read_keep_alive(headers: Iterable[tuple[bytes, bytes]], settings: KeepAliveSettings) -> KeepAliveSettings:
    """What a request wants (`X-TokenFlow-Keep-Alive`), else `settings`. Raises `BadRequest`."""
    for name, value in headers:
        if name == b"x-tokenflow-keep-alive":
            form = value.decode("latin-1")
            if form not in get_args(KeepAliveForm):
                forms = ", ".join(get_args(KeepAliveForm))
                raise BadRequest(f"X-TokenFlow-Keep-Alive must be one of {forms}, not {form!r}")
            return settings.model_copy(update={"form": cast(KeepAliveForm, form)})
    return settings


class KeepAlive:
    """Context manager around the wait for an engine: after `every_s` of silence the client hears `data`.

    It stands between two events, never in one, and only while nothing else is on its way. It says nothing of
    the engine, whose own time-outs run on. The first one begins the answer, if need be: from then on a
    failure can only be told inside the stream.
    """

    def __init__(self, head: EventHead, delivery: Delivery, data: bytes, *, every_s: float) -> None:
        self._head = head
        self._delivery = delivery
        self._data = data
        self._every_s = every_s

    @classmethod
    def of(
        cls,
        settings: KeepAliveSettings,
        dialect: Dialect,
        stream: Stream,
        head: EventHead,
        delivery: Delivery,
    ) -> KeepAlive | contextlib.nullcontext[None]:
        """As the settings say; nothing for an answer that is no stream."""
        if settings.form == "none" or not stream.streaming:
            return contextlib.nullcontext()
        data = dialect.keep_alive(stream) if settings.form == "chunk" else None
        return cls(head, delivery, data or _COMMENT, every_s=settings.every_s)

    async def __aenter__(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        wait_s = self._every_s
        try:
            while True:
                await asyncio.sleep(wait_s)
                wait_s = self._every_s - self._delivery.silent_s
                if wait_s <= 0:
                    await self._speak()
                    wait_s = self._every_s
        except Exception:  # noqa: BLE001 - the stream goes on without
            _log.exception("fault in a keep-alive")

    async def _speak(self) -> None:
        if self._delivery.between_events:
            await self._head.send()
            self._delivery.interject(self._data)
