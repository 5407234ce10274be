"""Record the answers of a running engine as transcripts.

    python tests/support/record_transcripts.py http://127.0.0.1:31000 [NAME...]

The engine is SGLang with SmolLM2-135M-Instruct, started with ``--served-model-name smollm2-135m
--tool-call-parser qwen25 --constrained-json-disable-any-whitespace``. Some are recorded only when asked for
by name, because the engine has to be started in another way:

- `chat_stream_error`: with ``SGLANG_REQ_RUNNING_TIMEOUT=4`` in its environment;
- `chat_stream_interval_continuous` and `chat_stream_reasoning_continuous`: with ``--stream-interval 4
  --reasoning-parser deepseek-r1``;
- `responses_stream`: a request that runs out of ``SGLANG_REQ_RUNNING_TIMEOUT=4``; the other responses, too,
  with the package ``openai-harmony`` installed, without which `error_responses_off` is what ``/v1/responses``
  answers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import click
from transcripts import Read, Transcript

KEPT_HEADERS = ("content-type", "content-length", "transfer-encoding", "cache-control", "x-accel-buffering")
MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"
SOURCE_PATH = re.compile(rb'(File \\")[^"]*/site-packages/')
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}

STRICT_WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CITY_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "City",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": ["Paris", "Rome"]},
                "country": {"type": "string", "enum": ["France", "Italy"]},
            },
            "required": ["name", "country"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Take:
    """One request to record. The request `abort_rid` is aborted after `abort_after_reads` parts."""

    path: str = CHAT
    body: str | None = None
    abort_rid: str | None = None
    abort_after_reads: int = 4
    on_demand: bool = False


def chat(question: str = "What is the capital of France?", **more: Any) -> str:
    """A chat request's body; temperature 0 unless `more` says otherwise."""
    messages = [{"role": "user", "content": question}]
    return json.dumps({"model": MODEL, "temperature": 0, "messages": messages, **more}, ensure_ascii=False)


def stream(question: str = "What is the capital of France?", **more: Any) -> str:
    return chat(question, stream=True, **more)


CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
RESPONSES = json.dumps({"model": MODEL, "input": "What is the capital of France?", "stream": True})
RESPONSES_PLAIN = json.dumps({"model": MODEL, "input": "What is the capital of France?", "temperature": 0})
RESPONSES_SHORT = json.dumps(
    {"model": MODEL, "input": "Tell me a story.", "temperature": 0, "stream": True, "max_output_tokens": 12}
)
MESSAGES_TOOL = {
    "name": "get_weather",
    "input_schema": WEATHER_TOOL["function"]["parameters"],
}
TAKES = {
    "models": Take(path="/v1/models"),
    "chat_plain": Take(body=chat()),
    "chat_stream": Take(body=stream()),
    "chat_stream_usage": Take(body=stream(stream_options={"include_usage": True})),
    "chat_stream_usage_continuous": Take(body=stream(stream_options=CONTINUOUS)),
    "chat_stream_n2_continuous": Take(
        body=stream(n=2, temperature=0.8, max_tokens=8, stream_options=CONTINUOUS)
    ),
    "chat_stream_tools_continuous": Take(
        body=stream(
            "Weather in Paris?",
            tools=[WEATHER_TOOL],
            tool_choice="required",
            max_tokens=60,
            stream_options=CONTINUOUS,
        )
    ),
    "chat_stream_emoji_continuous": Take(
        body=stream(
            "Only emoji please.",
            regex="([😀🎉🚀🌍👋🥐é] ?){12}",
            temperature=0.9,
            max_tokens=60,
            stream_options=CONTINUOUS,
        )
    ),
    "chat_stream_interval_continuous": Take(
        body=stream("Tell me a story.", max_tokens=42, separate_reasoning=False, stream_options=CONTINUOUS),
        on_demand=True,
    ),
    "chat_stream_reasoning_continuous": Take(
        body=stream("Tell me a story.", max_tokens=24, stream_options=CONTINUOUS), on_demand=True
    ),
    "completions_stream_continuous": Take(
        path="/v1/completions",
        body=json.dumps(
            {
                "model": MODEL,
                "prompt": "The capital of France is",
                "temperature": 0,
                "max_tokens": 12,
                "stream": True,
                "stream_options": CONTINUOUS,
            }
        ),
    ),
    "chat_stream_n2": Take(body=stream(n=2, temperature=0.8, max_tokens=8)),
    "chat_stream_logprobs": Take(body=stream(logprobs=True, top_logprobs=2)),
    "chat_stream_length": Take(body=stream("Tell me a story.", max_tokens=24)),
    "chat_stream_tools": Take(
        body=stream("Weather in Paris?", tools=[WEATHER_TOOL], tool_choice="required", max_tokens=60)
    ),
    **{
        name: Take(
            body=ask(
                "What is the weather in Paris?",
                tools=[STRICT_WEATHER_TOOL],
                tool_choice={"type": "function", "function": {"name": "get_weather"}},
                max_tokens=60,
            )
        )
        for name, ask in (("chat_tool_call", chat), ("chat_stream_tool_call", stream))
    },
    "chat_schema": Take(body=chat(response_format=CITY_SCHEMA)),
    "chat_stream_schema": Take(body=stream(response_format=CITY_SCHEMA)),
    "chat_n2": Take(body=chat(n=2, temperature=0.8, max_tokens=8)),
    "chat_logprobs": Take(body=chat(logprobs=True, top_logprobs=2)),
    "chat_stream_scripts": Take(
        body=stream(
            "What is hello in Chinese, Greek and Russian? Use the native script.",
            max_tokens=60,
            stream_options={"include_usage": True},
        )
    ),
    "chat_stream_emoji": Take(
        body=stream("Only emoji please.", regex="([😀🎉🚀🌍👋🥐é] ?){12}", temperature=0.9, max_tokens=60)
    ),
    "chat_stream_abort": Take(
        body=stream("Tell me a long story.", rid="aborted-stream", max_tokens=400), abort_rid="aborted-stream"
    ),
    "completions_stream": Take(
        path="/v1/completions",
        body=json.dumps(
            {
                "model": MODEL,
                "prompt": "The capital of France is",
                "temperature": 0,
                "max_tokens": 12,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ),
    ),
    "completions_plain": Take(
        path="/v1/completions",
        body=json.dumps({"model": MODEL, "prompt": "The capital of France is", "temperature": 0}),
    ),
    "messages_plain": Take(path="/v1/messages", body=chat(max_tokens=16)),
    "messages_stream": Take(path="/v1/messages", body=stream(max_tokens=16)),
    "messages_stream_length": Take(path="/v1/messages", body=stream("Tell me a story.", max_tokens=12)),
    "messages_stream_tools": Take(
        path="/v1/messages",
        body=stream("Weather in Paris?", tools=[MESSAGES_TOOL], tool_choice={"type": "any"}, max_tokens=60),
    ),
    "error_messages": Take(path="/v1/messages", body=stream(max_tokens=0)),
    "responses_plain": Take(path="/v1/responses", body=RESPONSES_PLAIN, on_demand=True),
    "responses_stream_completed": Take(
        path="/v1/responses",
        body=json.dumps({**json.loads(RESPONSES_PLAIN), "stream": True}),
        on_demand=True,
    ),
    "responses_stream_incomplete": Take(path="/v1/responses", body=RESPONSES_SHORT, on_demand=True),
    "responses_stream": Take(path="/v1/responses", body=RESPONSES, on_demand=True),
    "error_responses_off": Take(path="/v1/responses", body=RESPONSES, on_demand=True),
    "error_temperature": Take(body=stream(temperature=-1)),
    "error_context": Take(body=stream(max_tokens=9000)),
    "error_json": Take(body='{"model": "smollm2-135m", "messages": ['),
    "error_no_messages": Take(body=json.dumps({"model": MODEL, "stream": True})),
    "chat_stream_error": Take(body=stream("Tell me a long story.", max_tokens=400), on_demand=True),
}


class Recorder:
    """Talks to one engine, a connection per request."""

    def __init__(self, base_url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = urlsplit(base_url)
        self._clock = clock
        info = json.loads(self._fetch("/server_info"))
        self._engine = f"sglang {info['version']}"

    def record(self, name: str, take: Take) -> Transcript:
        """Send one request and keep all that comes back."""
        connection = self._open()
        started = self._clock()
        try:
            response = self._send(connection, take.path, take.body)
            reads = tuple(self._reads(response, take, started=started))
        finally:
            connection.close()
        return Transcript(
            name=name,
            engine=self._engine,
            model="SmolLM2-135M-Instruct",
            method="POST" if take.body else "GET",
            path=take.path,
            body=take.body,
            status=response.status,
            headers=_kept(response, reads),
            reads=reads,
        )

    def _open(self) -> HTTPConnection:
        assert self._address.hostname
        return HTTPConnection(self._address.hostname, self._address.port, timeout=120)

    def _fetch(self, path: str, body: str | None = None) -> bytes:
        connection = self._open()
        try:
            return self._send(connection, path, body).read()
        finally:
            connection.close()

    @staticmethod
    def _send(connection: HTTPConnection, path: str, body: str | None) -> HTTPResponse:
        data = body.encode() if body else None
        connection.request("POST" if data else "GET", path, data, {"Content-Type": "application/json"})
        return connection.getresponse()

    def _reads(self, response: HTTPResponse, take: Take, *, started: float) -> Iterator[Read]:
        before, count = started, 0
        while data := response.read1(1 << 20):
            now = self._clock()
            yield Read(round((now - before) * 1000, 1), SOURCE_PATH.sub(rb"\1", data))
            before, count = now, count + 1
            if take.abort_rid and count == take.abort_after_reads:
                self._fetch("/abort_request", json.dumps({"rid": take.abort_rid}))


def _kept(response: HTTPResponse, reads: tuple[Read, ...]) -> dict[str, str]:
    kept = {name: value for name in KEPT_HEADERS if (value := response.headers.get(name))}
    if "content-length" in kept:
        kept["content-length"] = str(sum(len(read.data) for read in reads))
    return kept


@click.command()
@click.argument("base_url")
@click.argument("names", nargs=-1)
def main(base_url: str, names: tuple[str, ...]) -> None:
    """Record NAMES (default: all that any engine gives) from the engine at BASE_URL."""
    recorder = Recorder(base_url)
    for name in names or [name for name, take in TAKES.items() if not take.on_demand]:
        transcript = recorder.record(name, TAKES[name])
        path = transcript.save()
        click.echo(
            f"{path.name}: {transcript.status}, {len(transcript.reads)} reads, {len(transcript.data)} B"
        )


if __name__ == "__main__":
    main()
