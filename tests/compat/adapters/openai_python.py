"""openai for Python, of any major, as an application uses it."""

from __future__ import annotations

from typing import Any

import openai
from job import Job, Outcome, first, serve
from pydantic import BaseModel


class City(BaseModel):
    name: str
    country: str


def client(job: Job) -> openai.OpenAI:
    return openai.OpenAI(base_url=job["base_url"], api_key="none", max_retries=job["retries"], timeout=60)


def chat(job: Job, outcome: Outcome) -> None:
    with client(job) as api:
        if not job["body"].get("stream"):
            outcome.add_chunk(api.chat.completions.create(**job["body"]).model_dump())
            return
        with api.chat.completions.create(**job["body"]) as stream:
            for chunk in first(stream, job["leave_after"]):
                outcome.add_chunk(chunk.model_dump())


def parse(job: Job, outcome: Outcome) -> None:
    body = {name: value for name, value in job["body"].items() if name not in ("stream", "response_format")}
    with client(job) as api:
        if job["body"].get("stream"):
            with api.chat.completions.stream(**body, response_format=City) as stream:
                for event in stream:
                    if event.type == "chunk":
                        outcome.add_chunk(event.chunk.model_dump())
                completion: Any = stream.get_final_completion()
        else:
            completion = api.chat.completions.parse(**body, response_format=City)
            outcome.add_chunk(completion.model_dump())
    outcome.parsed = completion.choices[0].message.parsed.model_dump()


def models(job: Job, outcome: Outcome) -> None:
    with client(job) as api:
        outcome.models = [model.id for model in api.models.list()]


serve(openai.__version__, {"chat": chat, "parse": parse, "models": models})
