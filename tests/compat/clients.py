"""Which clients are tested, and how a test talks to one: a process of its own that does jobs line by line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from compat.environments import ADAPTERS, NODE_ADAPTERS, node, python

__all__ = ["CLIENTS", "Client", "ClientProcess", "Outcome", "client"]


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client. `cannot` names features it does not have, with what it does instead."""

    name: str
    command: Callable[[], list[str]]
    cannot: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the client's user got to see; ``adapters/job.py`` says more."""

    texts: list[str]
    finish_reasons: list[str]
    tool_calls: list[dict[str, str]]
    chunks: int
    logprobs: int
    usage: Mapping[str, int] | None
    parsed: Any
    models: list[str]
    error: Mapping[str, Any] | None

    @property
    def text(self) -> str:
        return self.texts[0] if self.texts else ""


class ClientProcess:
    """A client that runs. A context manager; its environment is made on entering if it is not there."""

    def __init__(self, described: Client) -> None:
        self.name = described.name
        self.version = ""
        self._command = described.command

    def __enter__(self) -> Self:
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"},
        )
        self.version = self._answer()["version"]
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    async def ask(
        self,
        base_url: str,
        body: Mapping[str, Any],
        *,
        op: str = "chat",
        retries: int = 0,
        leave_after: int | None = None,
    ) -> Outcome:
        """One job done. Raises `RuntimeError` with its last words if the process died of it."""
        job = {"op": op, "base_url": base_url, "body": body, "retries": retries, "leave_after": leave_after}
        return Outcome(**await asyncio.to_thread(self._do, job))

    def _do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._stderr.seek(0)
            raise RuntimeError(f"{self.name} died: {self._stderr.read().decode(errors='replace')}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _python(environment: str, adapter: str) -> Callable[[], list[str]]:
    return lambda: [str(python(environment)), str(ADAPTERS / adapter)]


def _node(adapter: str, *packages: str) -> Callable[[], list[str]]:
    return lambda: [str(node()), str(NODE_ADAPTERS / adapter), *packages]


_NO_MODELS = {"models": "has no list of models"}
_AI_SDK = {
    **_NO_MODELS,
    "n": "shows one choice",
    "n-stream": "shows one choice",
    "logprobs": "does not show them",
    "logprobs-stream": "does not show them",
}
_OPEN_WEBUI = {
    "schema": "does not ask for it",
    "schema-stream": "does not ask for it",
    "n": "shows the first choice",
    "n-stream": "shows the first choice",
    "logprobs": "does not show them",
    "logprobs-stream": "does not show them",
    "retry-429": "does not retry",
    "retry-503": "does not retry",
}
_OPEN_WEBUI_PAGE = {
    **_OPEN_WEBUI,
    "plain": "streams",
    "refused-plain": "streams",
    "tools": "shows text",
    "tools-stream": "shows text",
}
_LANGCHAIN = {**_NO_MODELS, "n-stream": "streams one choice"}

CLIENTS = (
    Client(name="openai-python 1", command=_python("openai-python-1", "openai_python.py")),
    Client(name="openai-python 3", command=_python("openai-python-3", "openai_python.py")),
    Client(name="openai-node 6", command=_node("openai.mjs", "openai-6")),
    Client(name="openai-node 7", command=_node("openai.mjs", "openai")),
    Client(
        name="AI SDK 6",
        command=_node("ai_sdk.mjs", "ai-6", "@ai-sdk/openai-compatible-2"),
        cannot=_AI_SDK,
    ),
    Client(
        name="AI SDK 7",
        command=_node("ai_sdk.mjs", "ai", "@ai-sdk/openai-compatible"),
        cannot=_AI_SDK,
    ),
    Client(
        name="LangChain Python",
        command=_python("langchain-python", "langchain_python.py"),
        cannot=_LANGCHAIN,
    ),
    Client(name="LangChain JS", command=_node("langchain.mjs"), cannot=_LANGCHAIN),
    Client(
        name="Open WebUI server",
        command=_python("open-webui", "open_webui.py"),
        cannot=_OPEN_WEBUI,
    ),
    Client(name="Open WebUI page", command=_node("open_webui_page.mjs"), cannot=_OPEN_WEBUI_PAGE),
    Client(name="curl", command=lambda: [sys.executable, str(ADAPTERS / "curl.py")]),
)


def client(name: str) -> Client:
    """The client of this name."""
    return next(known for known in CLIENTS if known.name == name)
