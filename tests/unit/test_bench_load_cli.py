"""`tokenflow bench` as it is typed, against an engine in another thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from support.replay_engine import ReplayEngine, Script, Send
from tokenflow_bench.load.cli import bench
from tokenflow_gateway.cli import cli

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
    return CliRunner().invoke(bench, list(arguments))


def test_shows_and_keeps_figures(url: str, tmp_path: Path) -> None:
    figures, log = tmp_path / "figures.json", tmp_path / "log.jsonl"
    files = ["--json", str(figures), "--log", str(log)]
    result = run(url, *SPREAD, "--streams", "3", "--max-lag-ms", "10000", *files)
    assert result.exit_code == 0, result.output
    assert "3, 3" in result.output
    document = json.loads(figures.read_text())
    assert document["figures"]["output_tokens_mean"] == 2
    assert document["objection"] is None
    assert document["plan"]["arrivals"] == "poisson"
    assert document["plan"]["end_s"] is None, "JSON has no infinity"
    assert document["client"]["model"] == "m"
    assert {"seed", "command", "machine", "versions", "driver", "mark"} <= set(document)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [len(line["token_s"]) for line in lines] == [2, 2, 2]


@pytest.mark.parametrize("people", ["scanning", "listening", "machine"])
def test_people(url: str, people: str) -> None:
    options = ["--streams", "4", "--per-s", "20", "--max-lag-ms", "10000", "--arrivals", "gamma"]
    result = run(url, "--people", people, *options)
    assert result.exit_code == 0, result.output
    assert "4, 4" in result.output


def test_classes_have_a_table_of_their_own(url: str) -> None:
    mix = ["--sla", "premium:1,ttft=0.5", "--sla", "economy:1"]
    result = run(url, *SPREAD, *mix, "--streams", "12", "--max-lag-ms", "10000")
    assert result.exit_code == 0, result.output
    assert "economy  " in result.output.partition("class ")[2]


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


def test_the_key_is_not_in_the_document(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [url, *SPREAD, "--streams", "3", "--max-lag-ms", "10000", "--api-key", "secret"]
    arguments += ["--json", str(tmp_path / "figures.json")]
    monkeypatch.setattr("sys.argv", ["tokenflow", "bench", *arguments, "--api-key=secret"])
    assert run(*arguments).exit_code == 0
    text = (tmp_path / "figures.json").read_text()
    assert "secret" not in text
    assert f"tokenflow bench {url}" in json.loads(text)["command"]


def test_no_answers_are_no_figures(url: str) -> None:
    result = run(url, *SPREAD, "--streams", "3", "--model", "unknown", "--max-lag-ms", "10000")
    assert result.exit_code == 1
    assert "No answer came to its end" in result.output
    assert "error, 3 times" in result.output


def test_says_when_nobody_took_reports(url: str) -> None:
    result = run(url, *SPREAD, "--streams", "3", "--report-every", "1", "--max-lag-ms", "10000")
    assert "no TokenFlow gateway" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ftp://somewhere"], "is not an http(s) URL"),
        (["http://127.0.0.1:9"], "names no model"),
        (["http://127.0.0.1:9", "--arrivals", "trace"], "need --trace FILE"),
        (["http://127.0.0.1:9", "--sla", "premium:0"], "share must be more than 0"),
        (["http://127.0.0.1:9", "--sla", "a:1", "--sla", "a:2"], "two classes of one name"),
        (["http://127.0.0.1:9", "--per-s", "0"], "--per-s"),
        (["http://127.0.0.1:9", "--pauses", "report"], "needs --report-every"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments: list[str], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code in {1, 2}
    assert complaint in result.output
    assert "Traceback" not in result.output


def test_a_bad_trace_is_named_with_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "bad.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,many\n")
    result = run("http://127.0.0.1:9", "--arrivals", "trace", "--trace", str(trace))
    assert result.exit_code == 1
    assert "line 2: GeneratedTokens is 'many'" in result.output


def test_is_a_command_of_tokenflow() -> None:
    """With its own help, and not among what `tokenflow --help` has to import."""
    shown = CliRunner().invoke(cli, ["bench", "--help"])
    assert shown.exit_code == 0
    assert "Usage: tokenflow bench [OPTIONS] URL" in shown.output
    assert "--report-every" in shown.output
    assert "Drive any OpenAI-compatible endpoint" in CliRunner().invoke(cli, ["--help"]).output


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow_gateway.cli.import_module", _missing)
    shown = CliRunner().invoke(cli, ["bench", "http://127.0.0.1:9"])
    assert shown.exit_code == 1
    assert "tokenflow bench needs numpy: pip install '.[bench]'" in shown.output


def _missing(_name: str) -> None:
    raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
