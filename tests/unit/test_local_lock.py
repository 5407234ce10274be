"""Two installations at once: the second says that it waits, and goes on when the first has ended."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from tokenflow_gateway.local.lock import exclusive

HOLDER = """
import sys, pathlib
from tokenflow_gateway.local.lock import exclusive
with exclusive(pathlib.Path(sys.argv[1]), on_wait=lambda: None):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[bytes]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    return holder


def test_a_free_lock_is_taken_without_waiting(tmp_path: Path):
    waited: list[bool] = []
    with exclusive(tmp_path / "lock", on_wait=lambda: waited.append(True)):
        pass
    assert waited == []


def test_the_second_waits_until_the_first_has_ended(tmp_path: Path):
    path = tmp_path / "lock"
    with hold(path) as holder:
        waiting, entered = threading.Event(), threading.Event()

        def enter() -> None:
            with exclusive(path, on_wait=waiting.set):
                entered.set()

        thread = threading.Thread(target=enter)
        thread.start()
        assert waiting.wait(10)
        assert not entered.is_set()
        holder.kill()  # SIGKILL: the kernel gives the lock back
        thread.join(10)
        assert entered.is_set()
        holder.stdin.close()
        holder.stdout.close()
