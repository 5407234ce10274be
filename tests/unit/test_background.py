"""Background parts of the gateway outlive their own faults, and end when they are told to."""

from __future__ import annotations

import asyncio

import pytest

from tokenflow_gateway import app
from tokenflow_gateway.app import kept_running


async def test_a_part_that_fails_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "RESTART_AFTER_S", 0)
    begun = 0
    third = asyncio.Event()

    async def part() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise KeyError(begun)
        third.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(kept_running(part))
    async with asyncio.timeout(5):
        await third.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert begun == 3
