"""The profile of streams that clients get (see docs/wire.md), as a check on their bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["DONE", "PING", "Received", "check_profile", "event", "text_chunk", "usage_chunk"]

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_HEAD = b"data: "
_TAKEN_KEYS = {"event", "type", "selected_model_id"}
"""Keys at the top of a chunk that Open WebUI takes for its own."""


def event(data: object) -> bytes:
    """One event with this object, as SGLang writes it."""
    return _HEAD + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def text_chunk(content: str | None, *, finish: str | None = None, **delta: object) -> bytes:
    """A chunk of a chat."""
    choice = {"index": 0, "delta": {**delta, "content": content}, "finish_reason": finish}
    return event({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})


def usage_chunk(completion_tokens: int) -> bytes:
    """The usage at the end."""
    usage = {"prompt_tokens": 5, "completion_tokens": completion_tokens}
    return event({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": usage})


@dataclass(frozen=True, kw_only=True)
class Received:
    """A whole stream as a client understands it: `chunks` in order, then perhaps `error`."""

    chunks: list[dict[str, Any]]
    error: dict[str, Any] | None
    pings: int

    @property
    def text(self) -> str:
        """All text of the first choice."""
        return "".join(self._texts())

    def _texts(self) -> Iterator[str]:
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice.get("index", 0) == 0:
                    yield choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def check_profile(body: bytes, *, pings: bool = False, json_only: bool = True) -> Received:
    """The stream in `body`, or AssertionError saying what of it is outside the profile.

    Every event is one line ``data: ...`` and a blank line; its data is an object, and ``[DONE]`` the last,
    once. An error, which has a message, is the last before that. With `pings`, the comment ``: ping`` may
    stand between events. Without `json_only`, data may be anything but nothing: what an engine sends that is
    no JSON passes the gateway, for the client to refuse.
    """
    assert body.endswith(DONE), f"does not end in [DONE]: {body[-200:]!r}"
    assert b"\r" not in body, "a CR"
    assert b"\n\n\n" not in body, "an empty event"
    blocks = body.removesuffix(b"\n\n").split(b"\n\n")
    assert blocks.count(b"data: [DONE]") == 1, "more than one [DONE]"
    assert blocks.pop() == b"data: [DONE]", "something after [DONE]"
    seen_pings = sum(block + b"\n\n" == PING for block in blocks)
    assert pings or not seen_pings, "a ping that nobody asked for"
    parsed = [_object_of(block, json_only=json_only) for block in blocks if block + b"\n\n" != PING]
    chunks = [chunk for chunk in parsed if chunk is not None]
    error = chunks.pop()["error"] if chunks and chunks[-1].get("error") is not None else None
    assert error is None or "message" in error, f"not an OpenAI error: {error}"
    for chunk in chunks:
        assert chunk.get("error") is None, "something after an error"
        if json_only:
            assert isinstance(chunk.get("choices"), list), f"no choices: {chunk}"
            assert not _TAKEN_KEYS & set(chunk), f"a key that clients interpret: {chunk}"
    return Received(chunks=chunks, error=error, pings=seen_pings)


def _object_of(block: bytes, *, json_only: bool) -> dict[str, Any] | None:
    """The object in one event; None where it is none, and may be none."""
    for line in block.split(b"\n"):
        assert line.startswith(_HEAD), f"not a data line: {line!r}"
    assert block.replace(_HEAD, b"").strip(), "an empty data"
    if json_only:
        assert b"\n" not in block, f"more than one line: {block!r}"
    try:
        parsed = json.loads(b"\n".join(line.removeprefix(_HEAD) for line in block.split(b"\n")))
    except (ValueError, RecursionError):
        assert not json_only, f"not JSON: {block!r}"
        return None
    assert isinstance(parsed, dict) or not json_only, f"not an object: {block!r}"
    return parsed if isinstance(parsed, dict) else None
