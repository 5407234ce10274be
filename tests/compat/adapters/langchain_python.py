"""LangChain for Python with langchain-openai, as a chain uses it."""

from __future__ import annotations

import json
from contextlib import closing
from importlib.metadata import version
from typing import Any

from job import Job, Outcome, first, serve
from langchain_core.messages import AIMessage, convert_to_messages
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city and where it lies."""

    name: str
    country: str


def model(job: Job) -> ChatOpenAI:
    body = job["body"]
    known = ("model", "temperature", "max_tokens", "n", "logprobs", "top_logprobs")
    return ChatOpenAI(
        base_url=job["base_url"],
        api_key="none",
        max_retries=job["retries"],
        timeout=60,
        stream_usage=bool(body.get("stream_options")),
        **{name: body[name] for name in known if name in body},
    )


def chat(job: Job, outcome: Outcome) -> None:
    body = job["body"]
    chain: Any = model(job)
    if "tools" in body:
        chain = chain.bind_tools(body["tools"], tool_choice=body["tool_choice"])
    if body.get("stream"):
        total: Any = None
        with closing(chain.stream(body["messages"])) as stream:
            for chunk in first(stream, job["leave_after"]):
                outcome.chunks += 1
                total = chunk if total is None else total + chunk
        take(total, outcome)
    elif "n" in body:
        for choice, generation in enumerate(
            chain.generate([convert_to_messages(body["messages"])]).generations[0]
        ):
            take(generation.message, outcome, choice)
    else:
        take(chain.invoke(body["messages"]), outcome)


def take(message: AIMessage, outcome: Outcome, choice: int = 0) -> None:
    outcome.add_text(message.text, choice)
    outcome.finish(message.response_metadata.get("finish_reason"), choice)
    outcome.logprobs += len((message.response_metadata.get("logprobs") or {}).get("content") or ())
    if usage := message.usage_metadata:
        outcome.set_usage(usage["input_tokens"], usage["output_tokens"])
    for index, call in enumerate(message.tool_calls):
        outcome.add_tool_call(index, call["name"], json.dumps(call["args"]))


def parse(job: Job, outcome: Outcome) -> None:
    body = job["body"]
    chain = model(job).with_structured_output(City, method="json_schema")
    if body.get("stream"):
        for part in chain.stream(body["messages"]):
            outcome.parsed = part.model_dump()
    else:
        outcome.parsed = chain.invoke(body["messages"]).model_dump()


serve(version("langchain-openai"), {"chat": chat, "parse": parse})
