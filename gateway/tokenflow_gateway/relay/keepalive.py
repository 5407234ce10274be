"""Something for a client, and for the proxies before it, to hear while there is nothing to say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import cast, get_args

import structlog

from tokenflow_gateway.config import KeepAliveForm, KeepAliveSettings
from tokenflow_gateway.relay.answer import EventHead
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.dialects import Dialect, Meter
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

    It stands between two events, never in one nor behind the last, and only while nothing else is on its
    way. It says nothing of the engine, whose own time-outs run on. The first one begins the answer, if need
    be: from then on a failure can only be told inside the stream.
    """

    def __init__(
        self, head: EventHead, delivery: Delivery, meter: Meter, data: bytes, *, every_s: float
    ) -> None:
        self._head = head
        self._delivery = delivery
        self._meter = meter
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
        meter: Meter,
    ) -> KeepAlive | None:
        """As the settings say; none for an answer that is no stream."""
        if settings.form == "none" or not stream.streaming:
            return None
        data = dialect.keep_alive(stream) if settings.form == "chunk" else None
        return cls(head, delivery, meter, data or _COMMENT, every_s=settings.every_s)

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._speaking: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(self._every_s, self._look)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._speaking is not None:
            self._speaking.cancel()
            await asyncio.wait((self._speaking,))

    def _look(self) -> None:
        wait_s = self._every_s - self._delivery.silent_s
        if wait_s > 0:
            self._timer = self._loop.call_later(wait_s, self._look)
        else:
            self._speaking = self._loop.create_task(self._speak())

    async def _speak(self) -> None:
        try:
            if self._delivery.between_events and not (self._meter.done and self._delivery.empty):
                await self._head.send()
                self._delivery.interject(self._data)
        except Exception:  # noqa: BLE001 - the stream goes on without
            _log.exception("fault in a keep-alive")
            return
        self._timer = self._loop.call_later(self._every_s, self._look)
