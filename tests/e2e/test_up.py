"""`tokenflow up` for real: from a command to an answer, and nothing left afterwards, however it ends.

Needs the engine's environment and the embedded model in TOKENFLOW_HOME, as `make test` prepares them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
READY_S = 180.0
END_S = 10.0
"""How long an end may take, by the requirement."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s: {what}"
        time.sleep(0.1)


class Run:
    """One `tokenflow up` on free ports, and all processes that come of it.

    They are known by a mark in their environment, and, because some overwrite that with a title, by having
    been seen as descendants.
    """

    def __init__(self, directory: Path, *, port: int | None = None) -> None:
        self.port = port or free_port()
        self.engine_port = free_port()
        self.output = directory / "output"
        self._mark = uuid.uuid4().hex
        self._seen: set[tuple[str, str]] = set()
        environ = {
            **os.environ,
            "TOKENFLOW_HOME": os.environ.get("TOKENFLOW_HOME", str(ROOT / ".tokenflow")),
            "TOKENFLOW_RUNTIME_DIR": str(directory / "run"),
            "TOKENFLOW_PORT": str(self.port),
            "TOKENFLOW_ENGINE_PORT": str(self.engine_port),
            "TOKENFLOW_TEST_MARK": self._mark,
        }
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tokenflow_gateway.cli", "up"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                process_group=0,  # so that a test can do what Ctrl-C does: signal the foreground group
            )

    def said(self) -> str:
        return self.output.read_text()

    def wait_until_ready(self) -> None:
        def settled() -> bool:
            return "TokenFlow is ready" in self.said() or self.process.poll() is not None

        wait_until(settled, timeout_s=READY_S, what=f"not ready:\n{self.said()}")
        assert self.process.poll() is None, self.said()

    def alive(self) -> list[str]:
        """Command lines of what is left of this run."""
        return [_command(entry) for entry in self._processes()]

    def pid_of(self, words: str) -> int:
        """The one process of this run, wardens aside, whose command line has these words."""
        lines = {int(entry.name): _command(entry) for entry in self._processes()}
        (found,) = [pid for pid, line in lines.items() if words in line and "local.warden" not in line]
        return found

    def kill_rest(self) -> None:
        for entry in self._processes():
            os.kill(int(entry.name), signal.SIGKILL)
        self.process.wait()

    def _processes(self) -> list[Path]:
        table = {entry: _stat(entry) for entry in Path("/proc").glob("[0-9]*")}
        living = {entry: stat for entry, stat in table.items() if stat is not None and stat.state != "Z"}
        family = {str(self.process.pid)}
        for entry, stat in sorted(living.items(), key=lambda item: int(item[1].started_at)):
            if entry.name in family or stat.parent in family or self._mark in _read(entry / "environ"):
                family.add(entry.name)
                self._seen.add((entry.name, stat.started_at))
        return [entry for entry, stat in living.items() if (entry.name, stat.started_at) in self._seen]


class Stat(NamedTuple):
    state: str
    parent: str
    started_at: str


def _stat(entry: Path) -> Stat | None:
    fields = _read(entry / "stat").rpartition(")")[2].split()
    return Stat(fields[0], fields[1], fields[19]) if fields else None


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _command(entry: Path) -> str:
    return _read(entry / "cmdline").replace("\0", " ")


def ask(port: int) -> str:
    """The answer, not streamed, to a question that the embedded model knows."""
    question = {
        "model": "SmolLM2-135M-Instruct",
        "temperature": 0,
        "max_tokens": 24,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return str(json.load(answer)["choices"][0]["message"]["content"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(**options: int) -> Run:
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill_rest()


def test_up_answers_survives_its_engines_death_and_ends_on_ctrl_c(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_until_ready()
    assert f"API        http://127.0.0.1:{run.port}/v1\n" in run.said()
    assert f"Dashboard  http://127.0.0.1:{run.port}/dashboard\n" in run.said()
    assert "curl -N" in run.said()
    assert "Paris" in ask(run.port)

    os.kill(run.pid_of("sglang.launch"), signal.SIGKILL)
    wait_until(lambda: "The engine is back." in run.said(), timeout_s=READY_S, what=run.said())
    assert "The engine ended with code 137" in run.said()
    wait_until(lambda: _answers(run.port), timeout_s=30.0, what="the gateway did not find the engine again")

    os.killpg(run.process.pid, signal.SIGINT)
    assert run.process.wait(END_S) == 0
    assert run.alive() == []


def _answers(port: int) -> bool:
    try:
        return "Paris" in ask(port)
    except urllib.error.URLError:
        return False


def test_nothing_survives_a_kill_of_up(start: Callable[..., Run]) -> None:
    run = start()
    run.wait_until_ready()
    assert len(run.alive()) >= 7  # up, two wardens, gateway, and the engine's three: else nothing is shown
    assert any("scheduler" in line for line in run.alive())
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not run.alive(), timeout_s=END_S, what=f"left: {run.alive()}")


def test_sigterm_while_starting_ends_everything(start: Callable[..., Run]) -> None:
    run = start()
    wait_until(lambda: any("sglang.launch" in line for line in run.alive()), timeout_s=60.0, what=run.said())
    run.process.terminate()
    assert run.process.wait(END_S) == 0
    assert run.alive() == []


def test_a_port_in_use_is_one_line(start: Callable[..., Run]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = start(port=taken.getsockname()[1])
        assert run.process.wait(30) == 1
    assert run.said().count("\n") == 1
    assert run.said().startswith(f"tokenflow: Port {run.port} for the gateway is in use on 127.0.0.1")
