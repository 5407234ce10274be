"""Wire tests: each has a runtime directory of its own, so that it meets no other link by chance."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def small_heap() -> None:
    """What was there before is not looked through each time that a test asks what it has left behind."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def patient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is taken for gone because this machine is busy."""
    for module in ("engines.probe", "app"):  # of the whole probe, and of each of its steps
        monkeypatch.setattr(f"tokenflow_gateway.{module}.PROBE_TIMEOUT_S", 30.0)


@pytest.fixture(autouse=True)
def private_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A short path: sockets are made in it, and their addresses are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="tf-") as path:
        monkeypatch.setenv("TOKENFLOW_RUNTIME_DIR", path)
        yield path
