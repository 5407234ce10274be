"""Clients that run for a whole session, and the matrix of what they could do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from compat.cases import Named, Record
from compat.clients import CLIENTS, Client, ClientProcess

_PROPERTY = "compat"
_results: dict[str, Any] = {}


@pytest.fixture(scope="session")
def running() -> Iterator[Callable[[Client], ClientProcess]]:
    """Starts a client when it is first asked for."""
    started: dict[str, ClientProcess] = {}
    with ExitStack() as stack:

        def run(wanted: Client) -> ClientProcess:
            if wanted.name not in started:
                started[wanted.name] = stack.enter_context(ClientProcess(wanted))
            return started[wanted.name]

        yield run


@pytest.fixture(params=CLIENTS, ids=lambda known: known.name.replace(" ", "-"))
def client(request: pytest.FixtureRequest, running: Callable[[Client], ClientProcess]) -> ClientProcess:
    """Each client in turn."""
    return running(request.param)


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Record:
    """Names the place in the matrix that the test fills, with what stands there if it passes."""

    def fill(client: Named, row: str, table: str, found: str = "yes") -> None:
        record_property(_PROPERTY, (client.name, client.version, row, table, found))

    return fill


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, place in report.user_properties:
        if name == _PROPERTY:
            client_name, version, row, table, found = cast(tuple[str, ...], place)
            shown = _results.setdefault(client_name, {"version": version, "tables": {}})
            cells = shown["tables"].setdefault(table, {})
            cells[row] = "FAILS" if report.failed else cells.get(row, found)


def pytest_sessionfinish() -> None:
    """Add what was found to the file that ``TOKENFLOW_COMPAT_RESULTS`` names (see `compat.matrix`)."""
    if path := os.environ.get("TOKENFLOW_COMPAT_RESULTS"):
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(file.read_text()) if file.exists() else {}
        for client_name, shown in _results.items():
            before = known.get(client_name, {}).get("tables", {})
            tables = shown["tables"]
            shown["tables"] = {name: before.get(name, {}) | tables.get(name, {}) for name in before | tables}
        file.write_text(json.dumps(known | _results, indent=1))
