"""Environments of their own: the clients', and what the engine needs beside its own to send traces.

Each is made once, from the pinned versions beside the adapters, and again when they change.
``python -m compat.environments`` makes those of the normal test run, and those that it is told.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.real_engine import tokenflow_home

__all__ = ["ADAPTERS", "NODE_ADAPTERS", "node", "python"]

ADAPTERS = Path(__file__).parent / "adapters"
NODE_ADAPTERS = ADAPTERS / "node"
PYTHON = ("openai-python-1", "openai-python-3", "langchain-python", "open-webui", "engine-tracing")
"""Environments of the normal test run, each with a list of its packages in the adapters' folder."""


def python(name: str) -> Path:
    """The interpreter of this environment, made now if it is not there."""
    wanted = ADAPTERS / f"{name}.txt"
    folder = tokenflow_home() / "compat" / name
    with _made_once(folder, wanted) as is_missing:
        if is_missing:
            shutil.rmtree(folder, ignore_errors=True)
            _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
            pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"))
            _run(*pip, "install", "-qq", "--disable-pip-version-check", "--no-deps", "-r", str(wanted))
    return folder / "bin" / "python"


def node() -> Path:
    """The Node that the newest clients need, from their lock file, like them."""
    modules = NODE_ADAPTERS / "node_modules"
    with _made_once(modules, NODE_ADAPTERS / "package-lock.json") as is_missing:
        if is_missing:  # npm says at length that its own Node is too old for them: it only installs
            _run("npm", "ci", "--silent", "--no-audit", "--no-fund", cwd=NODE_ADAPTERS)
    (found,) = modules.glob("node-linux-*/bin/node")
    return found


@contextmanager
def _made_once(folder: Path, wanted: Path) -> Iterator[bool]:
    """Whether `folder` has to be made from `wanted`; at the end of the block it has been."""
    stamp = folder / ".made-from"
    locks = tokenflow_home() / "compat"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / f"{wanted.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at a time
        is_missing = not stamp.exists() or stamp.read_text() != wanted.read_text()
        yield is_missing
        if is_missing:
            shutil.copy(wanted, stamp)


def _run(*command: str, cwd: Path | None = None) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")


if __name__ == "__main__":
    for environment in (*PYTHON, *sys.argv[1:]):
        python(environment)
    node()
