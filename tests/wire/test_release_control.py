"""The control of the other tests of releases: each of these faults is found."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from support import leftovers
from support.release_stage import MOST_WAITS, SHAPES, asked, staged
from tokenflow_gateway.lifecycle import Lifecycle
from tokenflow_gateway.link.client import EngineLink
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.guard import RequestGuard
from tokenflow_gateway.relay.stream import StreamTable
from tokenflow_gateway.relay.upstream import Upstream
from tokenflow_gateway.tenants.fair_queue import FairQueue
from tokenflow_gateway.tenants.limits import LocalLimits


def keeps_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamTable, "remove", lambda self, rid: self.get(rid))


def keeps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamTable, "remove", lambda self, rid: self._streams.pop(rid, None))


def keeps_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Delivery, *_exc: object) -> None:
        pass

    monkeypatch.setattr(Delivery, "__aexit__", nothing)


def keeps_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: RequestGuard, *_exc: object) -> None:
        pass

    monkeypatch.setattr(RequestGuard, "__aexit__", nothing)


def keeps_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Upstream.request
    kept = []

    @asynccontextmanager
    async def request(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        kept.append(whole(*args, **kwargs))
        yield await kept[-1].__aenter__()

    monkeypatch.setattr(Upstream, "request", request)


def keeps_the_engine_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineLink, "closed", lambda _self, _rid, _reason: True)


def raises_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Lifecycle.close

    async def fail() -> None:
        raise ZeroDivisionError

    def close(self: Lifecycle, *args: Any) -> None:
        asyncio.get_running_loop().create_task(fail())
        whole(self, *args)

    monkeypatch.setattr(Lifecycle, "close", close)


def keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairQueue, "remove", lambda _self, _waiting: None)


def keeps_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLimits, "settle", lambda _self, _lease, _tokens: None)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (keeps_records, "stream"),
        (keeps_counts, "stream"),
        (keeps_text, "paced"),
        (keeps_watching, "stream"),
        (keeps_connections, "slow client"),
        (keeps_the_engine_waiting, "stream"),
        (raises_unheard, "stream"),
        (keeps_its_place, "queued"),
        (keeps_its_share, "limited"),
        (keeps_its_share, "limited, passed through"),
    ],
)
async def test_a_release_that_is_left_out_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    shape = replace(shape, headers={**shape.headers, "x-tokenflow-rate": "0.1"})
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.3)
    with pytest.raises(AssertionError, match="after reset at waits"):
        async with staged(shape) as stage:
            fault(monkeypatch)
            for number in range(1, MOST_WAITS, shape.step):
                await asked(stage, shape, number, ends="reset")
                gc.collect()
                if not stage.interruptible.acted:
                    break
