"""KV copied by torch: the checks of tests/gpu/check_kv.py that need no GPU, each a test here.

They run in the engine's interpreter, which has torch.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.real_engine import engine_python

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parents[1] / "gpu" / "check_kv.py"
COMMON = [
    "round trip, device pages of 1",
    "round trip, device pages of 16",
    "engine-like loop, device pages of 1",
    "engine-like loop, device pages of 16",
    "a backend proves itself",
    "a faulty backend does not",
    "corrupt host copy is not loaded",
    "failing write is reported",
    "failing load is reported",
    "failing write keeps its slots",
    "too little memory is said",
]
CHECKS = {
    "cpu": [*COMMON, "one kernel for all layers", "slots are not reused too early"],
    "simulated": [
        *COMMON,
        "wait 'forward': slow_forward_then_write",
        "wait 'forward': slow_forward_then_load",
        "wait 'reuse': reused_while_read",
        "wait 'reuse': loaded_while_read",
        "wait 'staging': many_writes",
        "wait 'staging': many_loads",
        "wait 'indices': plain_write",
    ],
}

Results = dict[str, dict[str, Any]]


@cache
def results(device: str) -> Results:
    command = [engine_python(), str(SCRIPT), "--device", device, "--json", "--no-rates"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    found = {result["check"]: result for result in map(json.loads, ended.stdout.splitlines())}
    assert (ended.returncode == 0) is all(result["passed"] for result in found.values()), ended.stderr
    return found


@pytest.mark.parametrize(("device", "check"), [(d, check) for d, names in CHECKS.items() for check in names])
def test_check(device: str, check: str) -> None:
    found = results(device)
    assert found[check]["passed"], found[check]["said"]


@pytest.mark.parametrize("device", CHECKS)
def test_none_is_left_out(device: str) -> None:
    assert list(results(device)) == CHECKS[device]
