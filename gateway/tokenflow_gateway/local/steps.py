"""Steps of an installation that are done once: each leaves a stamp, and a stamp names what it was made of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.logfile import open_log
from tokenflow_gateway.local.process import Runner, log_tail
from tokenflow_gateway.local.progress import Progress

__all__ = ["Step", "pending", "run_command", "run_steps"]

NETWORK_SIGNS = ("ConnectionError", "ConnectTimeoutError", "name resolution", "ProxyError", "Read timed out")
"""What pip prints when it cannot reach an index, before it claims that no version exists."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command. `content` is whatever, when it changes, makes the step and all after it run again."""

    name: str
    title: str
    argv: tuple[str, ...]
    content: str = ""


def pending(steps: Sequence[Step], *, stamps: Path) -> int:
    """How many of the steps, counted from the end, still have to run."""
    for index, (step, key) in enumerate(zip(steps, _keys(steps), strict=True)):
        if _read(stamps / step.name) != key:
            return len(steps) - index
    return 0


def run_steps(steps: Sequence[Step], *, stamps: Path, log: Path, run: Runner, progress: Progress) -> None:
    """Run the steps that have no valid stamp, in order. Raises `SetupError` at the first that fails."""
    done = len(steps) - pending(steps, stamps=stamps)
    for index, (step, key) in enumerate(zip(steps, _keys(steps), strict=True)):
        if index < done:
            progress.skip()
            continue
        (stamps / step.name).unlink(missing_ok=True)
        run_command(step.title, list(step.argv), log=log, run=run, progress=progress)
        stamps.mkdir(parents=True, exist_ok=True)
        (stamps / step.name).write_text(key)


def run_command(title: str, argv: list[str], *, log: Path, run: Runner, progress: Progress) -> None:
    """Run one command as a stage. Raises `SetupError` with the reason found in its output."""
    with progress.stage(title) as stage:
        with open_log(log) as file:
            file.write(f"$ {' '.join(argv)}\n".encode())
        code = run(argv, log, stage.note)
    if code != 0:
        raise SetupError(_reason(title, log_tail(log, lines=40), log=log))


def _reason(title: str, output: list[str], *, log: Path) -> str:
    text = "\n".join(output)
    if "No space left on device" in text:
        return f"{title}: the disk is full. Free some space and run the same command again: it continues here"
    if any(sign in text for sign in NETWORK_SIGNS):
        return (
            f"{title}: the download failed. Check the network and pip's settings (index, proxy), then run "
            f"the same command again: it continues here (details: {log})"
        )
    errors = [line for line in output if "error" in line.lower()] or output
    cause = errors[-1].strip() if errors else "no output"
    return f"{title} failed: {cause} (all of it: {log}). The same command, run again, continues here"


def _keys(steps: Sequence[Step]) -> list[str]:
    """A hash a step, over itself and all before it."""
    keys: list[str] = []
    for step in steps:
        previous = keys[-1] if keys else ""
        text = "\0".join([previous, step.name, *step.argv, step.content])
        keys.append(hashlib.sha256(text.encode()).hexdigest())
    return keys


def _read(stamp: Path) -> str | None:
    try:
        return stamp.read_text()
    except OSError:
        return None
