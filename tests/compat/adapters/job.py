"""How every Python adapter talks: a job as a line of JSON on stdin, its outcome as one on stdout.

A job is ``{"op": "chat" | "parse" | "models", "base_url", "body", "retries", "leave_after"}``: `body` is the
request as OpenAI's API spells it, which an adapter puts into its client's words; `parse` is a chat through
the client's helper for structured output; after `leave_after` chunks the user closes the window. This file
runs in the clients' environments: it needs nothing but Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Job", "Outcome", "first", "serve"]

Job = dict[str, Any]


class Outcome:
    """What the client's user got to see. `chunks` counts what the client handed over, empty ones included."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.finish_reasons: dict[int, str] = {}
        self.tool_calls: list[dict[str, str]] = []
        self.chunks = 0
        self.logprobs = 0
        self.usage: dict[str, int] | None = None
        self.parsed: Any = None
        self.models: list[str] = []
        self.error: dict[str, Any] | None = None

    def add_text(self, text: str | None, choice: int = 0) -> None:
        """More text of one choice."""
        self.texts[choice] = self.texts.get(choice, "") + (text or "")

    def finish(self, reason: str | None, choice: int = 0) -> None:
        """The reason why a choice ended, if it did."""
        if reason:
            self.finish_reasons[choice] = reason

    def add_tool_call(self, index: int, name: str | None, arguments: str | None) -> None:
        """A part of a tool call, or all of it."""
        while len(self.tool_calls) <= index:
            self.tool_calls.append({"name": "", "arguments": ""})
        self.tool_calls[index]["name"] += name or ""
        self.tool_calls[index]["arguments"] += arguments or ""

    def set_usage(self, prompt: int, completion: int) -> None:
        """The counts of tokens as the client shows them."""
        self.usage = {"prompt_tokens": prompt, "completion_tokens": completion}

    def add_chunk(self, chunk: dict[str, Any]) -> None:
        """A chunk, or a whole answer, in the form it has on the wire."""
        self.chunks += 1
        if usage := chunk.get("usage"):
            self.set_usage(usage["prompt_tokens"], usage["completion_tokens"])
        for choice in chunk.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or {}
            self.add_text(part.get("content"), choice["index"])
            self.finish(choice.get("finish_reason"), choice["index"])
            self.logprobs += len((choice.get("logprobs") or {}).get("content") or ())
            for position, call in enumerate(part.get("tool_calls") or ()):
                function = call["function"]
                index = call.get("index", position)
                self.add_tool_call(index, function.get("name"), function.get("arguments"))

    def fail(self, error: BaseException, status: int | None = None) -> None:
        """What the client raised, and the HTTP status it named."""
        self.error = {"type": type(error).__name__, "status": status, "message": str(error)}


def serve(version: str, ops: dict[str, Callable[[Job, Outcome], None]]) -> None:
    """Say which version of the client this is, then do jobs until stdin ends."""
    _print({"version": version})
    for line in sys.stdin:
        job = json.loads(line)
        outcome = Outcome()
        try:
            ops[job["op"]](job, outcome)
        except Exception as error:  # noqa: BLE001 - whatever the client raises is the outcome
            outcome.fail(error, getattr(error, "status_code", None))
        _print(
            {
                **vars(outcome),
                "texts": _listed(outcome.texts),
                "finish_reasons": _listed(outcome.finish_reasons),
            }
        )


def _listed(by_choice: dict[int, str]) -> list[str]:
    return [by_choice[index] for index in sorted(by_choice)]


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201 - stdout is the channel


def first(parts: Iterable[Any], count: int | None) -> Iterable[Any]:
    """The first `count` parts, or all."""
    for number, part in enumerate(parts, start=1):
        yield part
        if number == count:
            return
