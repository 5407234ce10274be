"""The bytes of a chat stream as SGLang 0.5.23 sends them: chunks of 250 to 300 bytes."""

from __future__ import annotations

__all__ = ["DONE", "KEY", "MODEL", "content", "opening"]

MODEL = "bench"
KEY = "sk-bench"
"""What clients say who they are with."""
_HEAD = (
    b'data: {"id":"c0a696b498614ddc83703bbacf080051","object":"chat.completion.chunk","created":1795963934,'
    b'"model":"bench","choices":[{"index":0,"delta":'
)
_OPENING = b'{"role":"assistant","content":"","reasoning_content":null,"tool_calls":null},'
_CONTENT = b'{"reasoning_content":null,"content":" capital"},'
_TAIL = b'"logprobs":null,"finish_reason":null,"matched_stop":null}]'
_LAST = b'"logprobs":null,"finish_reason":"stop","matched_stop":2}]'
_USAGE = (
    b',"usage":{"prompt_tokens":24,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":null,'
    b'"reasoning_tokens":0,"completion_tokens_details":null}'
)
_END = b"}\n\n"

DONE = _HEAD + b"{}," + _LAST + _END + b"data: [DONE]\n\n"
"""The last chunk, with its reason, and the end."""


def opening() -> bytes:
    """The first event, with the role."""
    return _HEAD + _OPENING + _TAIL + _END


def content(number: int, *, with_usage: bool) -> bytes:
    """One token; with the usage of each chunk where it was asked for."""
    usage = _USAGE % (number + 24, number) if with_usage else b""
    return _HEAD + _CONTENT + _TAIL + usage + _END
