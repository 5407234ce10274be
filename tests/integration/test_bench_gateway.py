"""`make bench-gateway` at the gateway that it measures: with its key, its limits and its link."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tokenflow_bench.gateway.driver import Driver
from tokenflow_bench.gateway.scenarios import Scale, first_token, stalled_client
from tokenflow_bench.gateway.targets import running, running_link
from tokenflow_gateway.config import DeliverySettings


def test_streams_are_served_and_what_waits_for_a_client_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TOKENFLOW_STATE_DIR")  # which would go before the configuration of the bench
    cpu = min(os.sched_getaffinity(0))
    scale = Scale(quick=True)
    scale.first_tokens = 5
    with tempfile.TemporaryDirectory(prefix="tf-") as path, Driver() as driver, ExitStack() as stack:
        with driver.serving():
            stack.enter_context(running_link(Path(path), cpus=str(cpu)))
            target = stack.enter_context(running("TokenFlow", Path(path), engine_port=driver.port, cpu=cpu))
        figures = first_token(driver, target, scale) | stalled_client(driver, target, scale)
    cap_kb = DeliverySettings().max_buffered_bytes / 1024
    assert figures["ttft_p50_ms"] > 0
    assert cap_kb <= figures["stalled_held_kb"] <= cap_kb + 16
