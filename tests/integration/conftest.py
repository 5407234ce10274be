"""Each integration test has a runtime directory of its own, so that it meets no other link by chance."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def private_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A short path: sockets are made in it, and their addresses are limited to 107 bytes.

    Workers whose gateway was killed may still end, and write to it, when it is removed.
    """
    with tempfile.TemporaryDirectory(prefix="tf-", ignore_cleanup_errors=True) as path:
        monkeypatch.setenv("TOKENFLOW_RUNTIME_DIR", path)
        yield path
