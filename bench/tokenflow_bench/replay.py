"""An engine in a process of its own that says recorded tokens at a given pace: `max_tokens`, or for ever.

The events are those of the real engine (`tests/data/transcripts`), the content events over and over, on an
absolute schedule. ``GET /sent/{model}`` lists when each token of the latest request for that model left.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import click
import uvloop

from support.replay_engine import Pause, ReplayEngine, Script, SeenRequest, Send, Step
from support.transcripts import load

__all__ = ["RecordedText", "recorded_text"]

_RECORDINGS = ("chat_stream_length", "chat_stream")
_SENT = "/sent/"
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class RecordedText:
    """`opening` is the event with the role; each of `tokens` carries one token's text."""

    opening: bytes
    tokens: tuple[bytes, ...]
    chars_per_token: float

    @property
    def bytes_per_token(self) -> float:
        """Mean length of an event."""
        return sum(map(len, self.tokens)) / len(self.tokens)


def recorded_text() -> RecordedText:
    """Everything with content in the recordings, in order."""
    reads = [read.data for name in _RECORDINGS for read in load(name).reads]
    tokens = [(data, text) for data in reads if (text := _content(data))]
    chars = sum(len(text) for _, text in tokens)
    return RecordedText(reads[0], tuple(data for data, _ in tokens), chars / len(tokens))


def _content(event: bytes) -> str:
    data = event.removeprefix(b"data: ").strip()
    if not data.startswith(b"{"):
        return ""
    return "".join(choice["delta"].get("content") or "" for choice in json.loads(data)["choices"])


class PacedEngine(ReplayEngine):
    """Answers every chat with the recorded text, `rate` tokens per second, as long as it was asked to."""

    def __init__(self, *, rate: float, port: int) -> None:
        super().__init__(port=port)
        self._interval_s = 1 / rate
        self._text = recorded_text()
        self._sent: dict[str, list[float]] = {}

    def script_for(self, seen: SeenRequest) -> Script:
        if seen.path == "/v1/models":
            return _document({"object": "list", "data": [{"id": "recorded", "object": "model"}]})
        if seen.path.startswith(_SENT):
            return _document(self._sent.get(seen.path.removeprefix(_SENT), []))
        if seen.path == "/v1/chat/completions":
            sent = self._sent[seen.script_name] = []
            return Script(steps=self._say(sent, most=seen.json().get("max_tokens")))
        return super().script_for(seen)

    async def saw(self, seen: SeenRequest) -> None:
        """Keeps no list of requests: there are too many."""

    def _say(self, sent: list[float], *, most: int | None) -> Iterator[Step]:
        """Late tokens follow at once, so that the mean pace is kept."""
        yield Send(self._text.opening)
        due = time.monotonic()
        for event in islice(cycle(self._text.tokens), most):
            yield Pause(max(due - time.monotonic(), 0.0))
            yield Send(event)
            sent.append(time.monotonic())
            due += self._interval_s
        yield Send(b"data: [DONE]\n\n")


def _document(value: object) -> Script:
    body = json.dumps(value).encode()
    return Script(headers={**_JSON, "content-length": str(len(body))}, steps=[Send(body)])


async def _serve(rate: float, port: int) -> None:
    async with PacedEngine(rate=rate, port=port):
        await asyncio.get_running_loop().create_future()


@click.command()
@click.option("--rate", type=float, required=True, help="Tokens per second of each answer.")
@click.option("--port", type=int, required=True)
def main(*, rate: float, port: int) -> None:
    """Serve until killed."""
    uvloop.run(_serve(rate, port))


if __name__ == "__main__":
    main()
