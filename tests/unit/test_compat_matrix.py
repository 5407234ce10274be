"""The page of compatibility, from results that a run would have written."""

from __future__ import annotations

from typing import Any

import pytest

from compat.clients import CLIENTS
from compat.matrix import ENGINE, document

RUN = {"at": "2026-11-30T10:00:00Z", "versions": {"commit": "abc1234"}}


@pytest.fixture
def results() -> dict[str, Any]:
    tables = {"replayed": {"plain": "yes", "stream": "yes"}, "bare": {"half an answer": "raises"}}
    return {client.name: {"version": "1.2", "tables": tables} for client in CLIENTS}


def cells(page: str, title: str) -> list[str]:
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in row.strip("|").split("|")[1:]]


def test_a_row_has_a_cell_for_each_client(results: dict[str, Any]) -> None:
    assert cells(document(results, RUN), "stream") == ["yes"] * len(CLIENTS)


def test_what_a_client_does_not_have_is_a_dash_with_its_reason(results: dict[str, Any]) -> None:
    page = document(results, RUN)
    assert cells(page, "whole answer").count("-") == 1
    assert "streams (whole answer, " in page


def test_a_failure_and_what_was_not_run_show(results: dict[str, Any]) -> None:
    results["curl"] = {"version": "8", "tables": {"replayed": {"stream": "FAILS"}}}
    page = document(results, RUN)
    assert cells(page, "stream")[-1] == "FAILS"
    assert cells(page, "whole answer")[-1] == "not run"


def test_clients_that_make_the_same_of_it_stand_together(results: dict[str, Any]) -> None:
    names = ", ".join(client.name for client in CLIENTS)
    assert f"| half an answer | **raises**: {names} |" in document(results, RUN)


def test_the_page_says_when_and_of_what(results: dict[str, Any]) -> None:
    results[ENGINE] = {"version": "sglang 1.2.3", "tables": {}}
    assert "on 2026-11-30T10:00:00Z, at commit abc1234, with sglang 1.2.3." in document(results, RUN)
    del results[ENGINE]
    assert "with no real engine." in document(results, RUN)


def test_a_run_without_a_client_makes_no_page(results: dict[str, Any]) -> None:
    del results["curl"]
    with pytest.raises(ValueError, match="no results of curl"):
        document(results, RUN)
