"""curl as somebody at a terminal runs it: each event with the time it was printed at."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Curl", "curl"]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(kw_only=True)
class Curl:
    """A running curl. `at_s` of each event is seconds since the start, by the clock of this process."""

    process: asyncio.subprocess.Process
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    async def events(self) -> AsyncIterator[tuple[float, bytes]]:
        """Each event as soon as curl printed it, its blank line included; the rest of the body at the end."""
        assert self.process.stdout
        while True:
            try:
                event = await self.process.stdout.readuntil(b"\n\n")
            except asyncio.IncompleteReadError as end:
                if end.partial:
                    yield self._now_s(), end.partial
                return
            yield self._now_s(), event

    async def exit_code(self) -> int:
        """What curl made of it: 0, or 18 for a body cut short, 56 for a reset connection."""
        return await self.process.wait()

    async def leave(self) -> None:
        """The reader closes the window."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()  # drains the pipe: a full one would keep `wait` waiting

    async def read_head(self) -> None:
        assert self.process.stdout
        head = (await self.process.stdout.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *rest = head.splitlines()[:-1]
        self.status = int(first.split()[1])
        fields = (line.partition(":") for line in rest)
        self.headers = {name.lower(): value.strip() for name, _, value in fields}

    def _now_s(self) -> float:
        return time.monotonic() - self.started


@asynccontextmanager
async def curl(
    base_url: str, model: str, *, headers: Mapping[str, str] | None = None, **more: Any
) -> AsyncIterator[Curl]:
    """``curl -N`` on a streamed chat, with the answer's head already read; leaves at the end of the block."""
    body = json.dumps({"model": model, "messages": QUESTION, "stream": True, **more})
    fields = {"Content-Type": "application/json", **(headers or {})}
    process = await asyncio.create_subprocess_exec(
        *("curl", "--silent", "--no-buffer", "--include", "--max-time", "60"),
        *(argument for name, value in fields.items() for argument in ("--header", f"{name}: {value}")),
        *("--data-binary", body, f"{base_url}/chat/completions"),
        stdout=asyncio.subprocess.PIPE,
        limit=8 * 1024 * 1024,
    )
    running = Curl(process=process)
    try:
        await running.read_head()
        yield running
    finally:
        await running.leave()
