"""A reader in a process of its own: gets what to do as JSON on stdin, answers what it did on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

__all__ = ["ReaderProcess", "Reading", "Task", "Unread"]

_EXTRA_S = 30.0
Unread = tuple[float, int]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to ask where, and how to read it: seconds and tokens per second, 0 for a pause."""

    url: str
    model: str
    segments: Sequence[tuple[float, float]]
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_stdin(cls) -> Self:
        return cls(**json.load(sys.stdin))


@dataclass(kw_only=True)
class Reading:
    """What happened, in monotonic seconds. `positions`: how many tokens were read, from when on.

    `unread` samples what lay in the receive buffer; `bytes_per_token` is what a token took of it.
    """

    window: tuple[float, float] = (0.0, 0.0)
    positions: list[tuple[float, float]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    bytes_per_token: float | None = None
    receive_buffer_bytes: int | None = None

    def to_stdout(self) -> None:
        json.dump(asdict(self), sys.stdout)


class ReaderProcess:
    """`python -m {module}` at work. `result` waits for it."""

    def __init__(self, module: str, task: Task) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._limit_s = sum(seconds for seconds, _ in task.segments) + _EXTRA_S
        assert self._process.stdin
        self._process.stdin.write(json.dumps(asdict(task)))
        self._process.stdin.close()
        self._process.stdin = None

    def result(self) -> Reading:
        """What it did. Raises `RuntimeError` if it failed."""
        try:
            output, _ = self._process.communicate(timeout=self._limit_s)
        finally:
            self.kill()
        if self._process.returncode:
            raise RuntimeError(f"a reader failed: {self._process.args!r}")
        return Reading(**json.loads(output))

    def kill(self) -> None:
        """Harmless once it has ended."""
        self._process.kill()
        self._process.wait()
