"""@tokenflow/client in Node, under real SDKs, against real sockets."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.chat_server import ChatServer
from support.transcripts import load

pytestmark = pytest.mark.e2e

CLIENT = Path(__file__).resolve().parents[2] / "clients" / "js"
VENDOR = CLIENT.parents[1] / "examples" / "web-chat" / "vendor"
SDKS = ("openai", "ai-sdk", "plain")
PACE = 40
"""Tokens a second: of the server, and of who reads."""
SCRIPTS = load("chat_stream_scripts")


def run(*command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, cwd=CLIENT, capture_output=True, timeout=110, check=False)


def node(script: str, *arguments: str) -> bytes:
    """What the script wrote. A warning of Node's is an error."""
    done = run("node", "--throw-deprecation", f"test/e2e/{script}", *arguments)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return done.stdout


def chat(sdk: str, server: ChatServer, *more: str) -> dict[str, Any]:
    return json.loads(node("chat.mjs", sdk, server.base_url, *more))


def content(parts: Iterator[bytes]) -> list[str]:
    """The content of each event that has some."""
    lines = b"".join(parts).split(b"\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    texts = [event["choices"][0]["delta"].get("content") for event in events if event["choices"]]
    return [text for text in texts if text]


TEXT = "".join(content(read.data for read in SCRIPTS.reads))


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The client as `npm run build` makes it, with the dependencies of its lock file."""
    lock = CLIENT / "package-lock.json"
    installed = CLIENT / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        done = run("npm", "ci")
        assert done.returncode == 0, done.stderr.decode()
    done = run("npm", "run", "build")
    assert done.returncode == 0, done.stdout.decode()


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer([read.data for read in SCRIPTS.reads], interval_s=0.01) as server:
        yield server


def test_unit_tests_pass() -> None:
    """`node --test` on the client's own tests; none may be skipped."""
    done = run("node", "--test", *map(str, CLIENT.glob("dist/test/*.test.js")))
    assert done.returncode == 0, done.stdout.decode()
    assert b"# skipped 0" in done.stdout
    assert b"# pass 0\n" not in done.stdout


@pytest.mark.parametrize("sdk", SDKS)
def test_drops_into_sdks(server: ChatServer, sdk: str) -> None:
    """The same text as without it, the counts of the stream, the headers on the request, and a stream id."""
    seen = chat(sdk, server)
    assert seen["text"] == seen["shown"] == TEXT
    assert seen["id"] == server.streams[0].id
    texts = content(iter(server.parts))
    assert seen["delivered"] == {"tokens": len(texts), "chars": len(TEXT)}
    assert server.streams[0].headers["x-tokenflow-reader"] == "human"
    assert server.streams[0].request["stream"] is True


@pytest.mark.parametrize("sdk", SDKS)
def test_reports_a_paced_reader(server: ChatServer, sdk: str) -> None:
    """Rate, a pause and its end arrive; positions grow and end where the text does, and are taken by all."""
    server.interval_s = 1 / PACE
    server.hold_at(len(server.parts) - 1)  # the stream stays open while the reader reads
    answer = subprocess.Popen(
        ["node", "--throw-deprecation", "test/e2e/chat.mjs", sdk, server.base_url, str(PACE)],
        cwd=CLIENT,
        stdout=subprocess.PIPE,
    )
    try:
        paused = server.wait_for(lambda report: report["paused"])
        resumed = server.wait_for(lambda report: not report["paused"] and report["seq"] > paused["seq"])
        server.wait_for(lambda report: report["chars"] > len(TEXT) - 15)
        server.release()
        out, _ = answer.communicate(timeout=30)
    finally:
        answer.kill()
        answer.wait()
    seen = json.loads(out)
    assert seen["shown"] == TEXT
    assert seen["pauseMs"] >= 300
    assert 0.2 < resumed["at_s"] - paused["at_s"] < 1.0
    assert resumed["chars"] == paused["chars"]
    assert all(report["rate"] == PACE for report in server.reports)
    assert all("visible" not in report for report in server.reports)
    chars = [report["chars"] for report in server.reports]
    assert chars == sorted(chars)
    assert seen["shown"][: paused["chars"]] == TEXT[: paused["chars"]]


def test_reports_go_on_until_a_complete_answer_is_shown(server: ChatServer) -> None:
    """All of the text is there at once, shown for two seconds; the program ends when it is done."""
    server.interval_s = 0.0
    seen = chat("openai", server, "20")
    assert seen["shown"] == TEXT
    after = [report["chars"] for report in server.reports if not report["open"]]
    assert len(after) >= 3
    assert after == sorted(after)
    assert after[-1] == len(TEXT), "the last report says that all is shown"


def test_a_display_that_is_stopped_is_not_reported_as_slow(server: ChatServer) -> None:
    """The answer is complete, the reader leaves after a second: he was there, and no more."""
    server.interval_s = 0.0
    seen = chat("plain", server, "20", "1000")
    assert 0 < len(seen["shown"]) < len(TEXT)
    assert server.reports[-1]["chars"] == len(seen["shown"])


def test_a_server_of_another_kind_gets_no_reports(server: ChatServer) -> None:
    """Without the header nothing is reported: the control of the tests above."""
    server.gives_streams = False
    seen = chat("openai", server, "200")
    assert seen["shown"] == TEXT
    assert seen["id"] is None
    assert server.progress_requests == []


@pytest.mark.parametrize("broken", [400, 403, 404, 429, 500, "hang"])
def test_reports_that_fail_harm_nothing(server: ChatServer, broken: int | str) -> None:
    """Whatever the progress route answers, the text comes whole, and the program ends by itself."""
    server.broken_progress = broken
    seen = chat("openai", server, "100")
    assert seen["shown"] == TEXT
    assert server.progress_requests, "it was tried"
    assert server.reports == []


@pytest.mark.parametrize("cuts", [lambda size: range(0, size, 1), lambda size: range(0, size, 7)])
def test_bytes_pass_untouched(server: ChatServer, cuts: Callable[[int], range]) -> None:
    """Bytes out are bytes in, cut anywhere, and bytes that are no text at all."""
    body = SCRIPTS.data[:3000] + b"\xff\xfe\x00 no text \xf0\x9f" + SCRIPTS.data[-500:]
    edges = [*cuts(len(body)), len(body)]
    server.parts = [body[start:end] for start, end in pairwise(edges)]
    server.interval_s = 0
    assert node("bytes.mjs", server.base_url) == body


def test_example_has_the_client_as_built() -> None:
    """What the web example loads without a build is what `npm run vendor` makes of the sources."""
    built = {path.name: path.read_text() for path in (CLIENT / "dist" / "src").glob("*.js")}
    vendored = {path.name: path.read_text() for path in (VENDOR / "tokenflow-client").glob("*.js")}
    assert vendored == built


def test_lock_file_names_no_host() -> None:
    assert "resolved" not in (CLIENT / "package-lock.json").read_text()
