"""openai's SDK on `tokenflow_client`, in a loop that takes tokens at a known rate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai

import tokenflow_client
from tokenflow_bench.readers.accuracy.pace import pace
from tokenflow_bench.readers.accuracy.reader_process import Reading, Task

__all__: list[str] = []


def read(task: Task) -> Reading:
    """An event is read when the loop asks for the next one, as the client documents it."""
    reader, reading = tokenflow_client.TokenFlowReader(), Reading()
    http = tokenflow_client.http_client()
    with openai.OpenAI(base_url=f"{task.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        begun = time.monotonic()
        with client.chat.completions.create(
            model=task.model,
            messages=[{"role": "user", "content": "Go on."}],
            stream=True,
            extra_headers=reader.headers(),
        ) as stream:
            _follow(_tokens(stream), task, reading, reader)
            reading.window = (begun, time.monotonic())
    return reading


def _follow(tokens: Iterator[Any], task: Task, reading: Reading, reader: Any) -> None:
    def pause(seconds: float) -> None:
        begin = time.monotonic()
        if task.options["says_pause"]:
            with reader.paused():
                time.sleep(seconds)
        else:
            time.sleep(seconds)
        reading.pauses.append((begin, time.monotonic()))

    next(tokens)
    for read_before, _ in enumerate(pace(task.segments, pause=pause)):
        reading.positions.append((time.monotonic(), read_before + 1))
        next(tokens)


def _tokens(stream: Any) -> Iterator[Any]:
    """The chunks with content."""
    return (chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)


if __name__ == "__main__":
    read(Task.from_stdin()).to_stdout()
