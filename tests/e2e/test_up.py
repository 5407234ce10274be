"""`tokenflow up` for real: from a command to an answer, and nothing left afterwards, however it ends.

That nothing survives when it is killed is looked at in `test_main_job`, at the end of the run that it has.
Needs the engine's environment and the embedded model in TOKENFLOW_HOME, as `make test` prepares them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.up import END_S, READY_S, Run, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]


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
