"""A thousand readers from one core: `tokenflow bench` in a process of its own, an engine of recordings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenflow_bench.processes import replay_engine

ROOT = Path(__file__).parents[2]
READERS = 1000
MOST_CPU_SHARE = 0.6
"""Of the one core; measured: 0.1. How late the driver came depends on who else computes here."""


@pytest.mark.slow
def test_a_thousand_readers_from_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / name) for name in ("bench", "tests")))
    figures = tmp_path / "figures.json"
    core = min(os.sched_getaffinity(0))
    with replay_engine(tmp_path, rate=10.0) as engine:
        tokenflow = [sys.executable, "-m", "tokenflow_gateway.cli", "bench", engine.url]
        load = ["--streams", str(READERS), "--arrivals", "poisson", "--per-s", "250", "--output", "20"]
        limits = ["--horizon", "90", "--max-lag-ms", "10000", "--json", str(figures)]
        done = subprocess.run(
            ["taskset", "--cpu-list", str(core), *tokenflow, *load, *limits],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(figures.read_text())
    assert document["figures"]["whole"] == READERS
    assert document["figures"]["output_tokens_mean"] == pytest.approx(20, rel=0.1)
    assert document["driver"]["cpu_share"] < MOST_CPU_SHARE
    assert document["command"].startswith(f"tokenflow bench {engine.url}")
