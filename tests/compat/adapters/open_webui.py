"""What Open WebUI's server does with an OpenAI connection, in our own words (read at version 0.12).

It posts with aiohttp, looks at the content type, reads a stream line by line, and passes over what does not
begin with ``data:`` and over JSON that it cannot read; an error it shows in either case. It does not retry,
and shows the first choice only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from job import Job, Outcome, serve


class ShownError(Exception):
    """What the page shows in place of an answer."""

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


async def chat(job: Job, outcome: Outcome) -> None:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.post(f"{job['base_url']}/chat/completions", json=job["body"]) as answer,
    ):
        if "text/event-stream" in answer.headers.get("Content-Type", ""):
            await show_stream(answer, outcome, job["leave_after"])
            return
        content = await answer.json()
        if answer.status >= 400:
            raise ShownError(json.dumps(content), answer.status)
        outcome.add_chunk(first_choice(content))


async def show_stream(answer: aiohttp.ClientResponse, outcome: Outcome, leave_after: int | None) -> None:
    async for line in lines(answer.content):
        try:
            chunk = json.loads(line.removeprefix("data:").strip())
        except ValueError:
            continue  # [DONE], a comment, a blank line, what it cannot read
        if not chunk.get("choices") and chunk.get("error"):
            raise ShownError(json.dumps(chunk["error"]))
        if not line.startswith("data:"):
            continue
        outcome.add_chunk(first_choice(chunk))
        if outcome.chunks == leave_after:
            return


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """Lines of any length: the reader's own limit is passed by joining what comes."""
    rest = b""
    async for data, _ in content.iter_chunks():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace")
    if rest:
        yield rest.decode("utf-8", "replace")


def first_choice(chunk: dict[str, Any]) -> dict[str, Any]:
    return {**chunk, "choices": (chunk.get("choices") or [])[:1]}


async def models(job: Job, outcome: Outcome) -> None:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
        session.get(f"{job['base_url']}/models") as answer,
    ):
        outcome.models = [model["id"] for model in (await answer.json())["data"]]


serve(
    f"0.12 (path), aiohttp {aiohttp.__version__}",
    {
        "chat": lambda job, outcome: asyncio.run(chat(job, outcome)),
        "models": lambda job, outcome: asyncio.run(models(job, outcome)),
    },
)
