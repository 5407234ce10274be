"""A warded command leaves nothing behind: not when told to stop, not when its starter is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tokenflow_gateway.local.process import Process, log_tail, run_logged

# A parent, its child, and the child's orphan in a session of its own that ignores SIGTERM.
STUBBORN = """
import subprocess, sys, time
ORPHAN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('orphan', flush=True); time.sleep(600)"
)
CHILD = (
    "import subprocess, sys;"
    f"subprocess.Popen([sys.executable, '-c', {ORPHAN!r}], start_new_session=True)"
)
subprocess.run([sys.executable, "-c", CHILD])
time.sleep(600)
"""


def marked(mark: str) -> list[int]:
    """Living processes that carry `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(condition, *, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


@pytest.fixture
def mark():
    value = f"TOKENFLOW_TEST_MARK={uuid.uuid4().hex}"
    yield value
    for pid in marked(value):
        os.kill(pid, signal.SIGKILL)


def environ_with(mark: str) -> dict[str, str]:
    name, _, value = mark.partition("=")
    return {**os.environ, name: value}


def output(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def test_stop_kills_descendants_that_ignore_signals_and_left_the_session(mark: str, tmp_path: Path):
    log = tmp_path / "log"
    process = Process([sys.executable, "-c", STUBBORN], log=log, grace_s=0.3, environ=environ_with(mark))
    wait_until(lambda: "orphan" in output(log))
    assert len(marked(mark)) >= 3  # warden, parent, orphan
    process.stop()
    assert marked(mark) == []


def test_a_killed_starter_leaves_nothing_behind(mark: str, tmp_path: Path):
    log = tmp_path / "log"
    code = (
        "import sys, pathlib, time; from tokenflow_gateway.local.process import Process;"
        "Process([sys.executable, '-c', sys.argv[1]], log=pathlib.Path(sys.argv[2]), grace_s=0.3);"
        "time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, STUBBORN, str(log)], env=environ_with(mark))
    wait_until(lambda: "orphan" in output(log))
    starter.kill()
    starter.wait()
    wait_until(lambda: marked(mark) == [])


def test_without_a_warden_the_orphan_survives(mark: str, tmp_path: Path):
    """The negative control of the two tests above."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        plain = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=file, env=environ_with(mark))
    wait_until(lambda: "orphan" in output(log))
    plain.kill()
    plain.wait()
    assert marked(mark) != []


def test_the_grace_is_kept_for_a_command_that_ends_by_itself(tmp_path: Path):
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('bye'), sys.exit(0)));"
        "print('up', flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    process = Process([sys.executable, "-c", code], log=log, grace_s=30.0)
    wait_until(lambda: "up" in output(log))
    process.stop()
    assert log_tail(log, lines=1) == ["bye"]
    assert process.exit_code() == 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_the_exit_code_is_the_commands_own(code: str, expected: int, tmp_path: Path):
    assert run_logged([sys.executable, "-c", code], tmp_path / "log", lambda _: None) == expected


def test_a_command_that_does_not_exist_is_named_in_the_log(tmp_path: Path):
    log = tmp_path / "log"
    assert run_logged(["/no/such/program"], log, lambda _: None) == 127
    assert log_tail(log, lines=1) == ["/no/such/program: No such file or directory"]


def test_an_interrupted_run_ends_its_command(mark: str, tmp_path: Path, monkeypatch):
    name, _, value = mark.partition("=")
    monkeypatch.setenv(name, value)

    def interrupt(line: str) -> None:
        if line == "up":
            raise KeyboardInterrupt

    code = "import time; print('up', flush=True); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        run_logged([sys.executable, "-c", code], tmp_path / "log", interrupt)
    assert [pid for pid in marked(mark) if pid != os.getpid()] == []
