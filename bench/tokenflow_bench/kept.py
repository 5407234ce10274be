"""Results of runs that are done, so that what was interrupted goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tokenflow_bench.cases import Case
from tokenflow_engine import policy

__all__ = ["Kept"]

_HERE = Path(__file__).parent
_POLICIES = Path(policy.__file__).parent


class Kept:
    """A line of JSON for each run, added when it is done; those of other code count for nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._results = dict(self._read(path.read_text().splitlines()))

    def get(self, case: Case) -> dict[str, Any] | None:
        """None: to be run."""
        return self._results.get(repr(case))

    def add(self, case: Case, result: dict[str, Any]) -> None:
        """Keep it, here and in the file."""
        self._results[repr(case)] = result
        with self._path.open("a") as file:
            file.write(json.dumps({"code": _code(), "case": repr(case), "result": result}) + "\n")

    def forget(self) -> None:
        """All is done: remove the file."""
        self._path.unlink(missing_ok=True)

    @staticmethod
    def _read(lines: Iterable[str]) -> Iterable[tuple[str, dict[str, Any]]]:
        for line in lines:
            try:
                kept = json.loads(line)
            except ValueError:  # interrupted while it was written
                continue
            if kept["code"] == _code():
                yield kept["case"], kept["result"]


@cache
def _code() -> str:
    """A digest of all that a result depends on: simulator, policies, costs, workloads, figures."""
    digest = hashlib.sha256()
    folders = (_POLICIES, _HERE, _HERE / "simulator", _HERE / "traces")
    for path in sorted(path for folder in folders for path in folder.glob("*.*") if path.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
