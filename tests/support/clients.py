"""Real clients, as users have them: openai for Python and for Node, and curl.

All are told the base URL of an OpenAI-compatible API (ending in ``/v1``) and ask the same question. An answer
is a `Chat`; what the library raised is in its `error`, so that a test can compare libraries.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

__all__ = ["NODE_CLIENT", "Chat", "Curl", "curl", "install_node_client", "openai_node", "openai_python"]

NODE_CLIENT = Path(__file__).resolve().parent.parent / "e2e" / "node"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True, kw_only=True)
class ClientError:
    """What a library raised: its class, and the HTTP status where there was one."""

    type: str
    status: int | None
    message: str


@dataclass(kw_only=True)
class Chat:
    """One answer as a library gave it. `chunks` counts what it handed over, empty ones included."""

    text: str = ""
    chunks: int = 0
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    error: ClientError | None = None


async def openai_python(
    base_url: str, model: str, *, stream: bool, api_key: str = "none", **more: Any
) -> Chat:
    """One chat through openai for Python, in a thread of its own. `more` goes into the request."""
    return await asyncio.to_thread(_openai_python, base_url, model, stream, api_key, more)


def _openai_python(base_url: str, model: str, stream: bool, api_key: str, more: Mapping[str, Any]) -> Chat:
    chat = Chat()
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=30) as client:
        try:
            request = {"model": model, "messages": QUESTION, "stream": stream, **more}
            answer = client.chat.completions.create(**request)
            for chunk in answer if stream else [answer]:
                _add(chat, chunk)
        except openai.APIError as error:
            status = getattr(error, "status_code", None)
            chat.error = ClientError(type=type(error).__name__, status=status, message=error.message)
    return chat


def _add(chat: Chat, chunk: Any) -> None:
    chat.chunks += 1
    chat.usage = chunk.usage.model_dump() if chunk.usage else chat.usage
    for choice in chunk.choices or ():
        part = choice.delta if hasattr(choice, "delta") else choice.message
        chat.text += part.content or ""
        chat.finish_reason = choice.finish_reason or chat.finish_reason


async def install_node_client() -> None:
    """Install what the Node client needs, at the versions of its lock file, unless it is there."""
    wanted = json.loads((NODE_CLIENT / "package.json").read_text())["dependencies"]["openai"]
    installed = NODE_CLIENT / "node_modules" / "openai" / "package.json"
    if installed.exists() and json.loads(installed.read_text())["version"] == wanted:
        return
    npm = await asyncio.create_subprocess_exec("npm", "ci", cwd=NODE_CLIENT)
    if await npm.wait():
        raise RuntimeError(f"`npm ci` failed in {NODE_CLIENT}: run it there and see why")


async def openai_node(base_url: str, model: str, *, stream: bool) -> Chat:
    """One chat through openai for Node, in a process of its own; see `install_node_client`."""
    node = await asyncio.create_subprocess_exec(
        "node",
        NODE_CLIENT / "chat.mjs",
        base_url,
        model,
        "stream" if stream else "plain",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await node.communicate()
    if node.returncode:
        raise RuntimeError(f"chat.mjs failed: {err.decode()}")
    answer = json.loads(out)
    error = answer.pop("error", None)
    return Chat(**answer, error=ClientError(**error) if error else None)


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
