"""`python -m tokenflow_bench load` as it is typed, against an engine in another thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from support.replay_engine import ReplayEngine, Script, Send
from tokenflow_bench.__main__ import main

TOKEN = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
SCRIPTS = {
    "m": Script(steps=[Send(TOKEN), Send(TOKEN), Send(b"data: [DONE]\n\n")]),
    "/v1/models": Script(steps=[Send(b'{"data":[{"id":"m"}]}')]),
}

SPREAD = ["--arrivals", "poisson", "--per-s", "10"]
"""Long enough for the driver to see how late it is."""


@pytest.fixture
def url() -> Iterator[str]:
    """An engine that answers with two tokens."""
    addresses: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with ReplayEngine(SCRIPTS) as engine:
            addresses.append(engine.base_url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield addresses[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["load", *arguments])


def test_shows_and_keeps_figures(url: str, tmp_path: Path) -> None:
    figures, log = tmp_path / "figures.json", tmp_path / "log.jsonl"
    files = ["--json", str(figures), "--log", str(log)]
    result = run(url, *SPREAD, "--streams", "3", "--max-lag-ms", "10000", *files)
    assert result.exit_code == 0, result.output
    assert "3, 3" in result.output
    document = json.loads(figures.read_text())
    assert document["figures"]["output_tokens_mean"] == 2
    assert document["objection"] is None
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [len(line["token_s"]) for line in lines] == [2, 2, 2]


@pytest.mark.parametrize("people", ["fixed", "scanning", "machine"])
@pytest.mark.parametrize("arrivals", ["poisson", "gamma"])
def test_people_and_arrivals(url: str, people: str, arrivals: str) -> None:
    options = ["--streams", "4", "--per-s", "20", "--max-lag-ms", "10000"]
    result = run(url, "--people", people, "--arrivals", arrivals, *options)
    assert result.exit_code == 0, result.output
    assert "4, 4" in result.output


def test_replays_a_trace(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,9,4\n2023-11-16 18:15:47,9,4\n"
    )
    result = run(url, "--arrivals", "trace", "--trace", str(trace), "--faster", "5", "--max-lag-ms", "10000")
    assert result.exit_code == 0, result.output
    assert "2, 2" in result.output
    assert run(url, "--arrivals", "trace").exit_code == 2


def test_claims_nothing_with_a_late_driver(url: str) -> None:
    result = run(url, *SPREAD, "--streams", "3", "--max-lag-ms", "0")
    assert result.exit_code == 3
    assert "NOT TO BE USED" in result.output
    assert "ms late" in result.output
