"""An independent load client through a gateway with keep-alives, in front of a slow replayed engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compat.cases import Record
from compat.features import slow
from compat.load import aiperf
from support.gateway import running_gateway
from support.replay_engine import ReplayEngine
from support.scenarios import recordings

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif("TOKENFLOW_COMPAT_RESULTS" not in os.environ, reason="`make compat` runs it"),
]

MODEL = "smollm2-135m"


async def test_aiperf_takes_every_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    monkeypatch.setenv("TOKENFLOW_RUNTIME_DIR", str(tmp_path / "run"))
    scripts = {MODEL: slow(), "/v1/models": recordings("models")["models"]}
    settings = {"keep_alive": {"form": "comment", "every_s": 0.05}}
    async with (
        ReplayEngine(scripts) as engine,
        running_gateway({"url": engine.base_url, "link": "off"}, **settings) as gateway,
    ):
        measured = await aiperf(gateway.base_url, MODEL, tmp_path, requests=40, tokens=16)
        record(measured, f"replayed, with keep-alives: {measured}", "load")
        assert (measured.succeeded, measured.errors) == (40, 0)
        assert measured.tokens == 40 * 8
        assert measured.ttft_p50_ms > 150, "a keep-alive is no token"
        await gateway.everything_released()
