"""What is tried with every client: the request, who answers it how, and what the user has to get to see."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compat.clients import Outcome
from support.replay_engine import Never, Pause, Script, Send
from support.scenarios import (
    crlf,
    faults,
    raw,
    replay,
    split_at,
)
from support.transcripts import load

__all__ = [
    "ALL_FEATURES",
    "FEATURES",
    "KEPT_ALIVE",
    "LEAVES",
    "RETRIES",
    "Feature",
    "feature",
    "scripts",
    "slow",
]

TEXT = "The capital of France is Paris."
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)
LONG = "0123456789" * 20_000
"""200 kB: longer than what readers of lines take in one piece."""

Check = Callable[[Outcome], None]
Body = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One thing a client does. `answer` is the script by which the replayed engine answers.

    `as_direct`: the client sees through the gateway what it sees without, and the engine the same request.
    `real`: it is tried on the real engine, too, by `check_real` if that is another one.
    """

    name: str
    title: str
    check: Check
    answer: Callable[[], Script]
    op: str = "chat"
    body: Body = field(default_factory=dict)
    as_direct: bool = True
    real: bool = False
    check_real: Check | None = None

    def request(self, model: str) -> dict[str, Any]:
        """The body, with the model that chooses who answers."""
        return {"model": model, "temperature": 0, "messages": QUESTION, **self.body}


def recorded(name: str) -> Callable[[], Script]:
    return lambda: replay(load(name))


def as_recorded(name: str, *fields: str) -> Body:
    """These fields of the request that was recorded."""
    request = load(name).request_json()
    return {field: request[field] for field in fields}


def broken(fault: str) -> Callable[[], Script]:
    return lambda: faults(load("chat_stream_usage"))[fault]


# ---- what the user has to see ----


def whole(outcome: Outcome) -> None:
    assert outcome.error is None
    assert outcome.texts == [TEXT]
    assert outcome.finish_reasons == ["stop"]


def in_pieces(outcome: Outcome) -> None:
    whole(outcome)
    assert outcome.chunks >= 7, "a token at a time"
    assert outcome.usage is None, "nobody asked for it"


def with_usage(outcome: Outcome) -> None:
    whole(outcome)
    assert outcome.usage == {"prompt_tokens": 37, "completion_tokens": 8}


def calls_the_tool(outcome: Outcome) -> None:
    assert outcome.error is None
    (call,) = outcome.tool_calls
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Paris"}


def gives_the_city(outcome: Outcome) -> None:
    assert outcome.error is None
    assert outcome.parsed == {"name": "Paris", "country": "France"}


def two_choices(outcome: Outcome) -> None:
    assert outcome.error is None
    assert len(outcome.texts) == len(outcome.finish_reasons) == 2
    assert all(outcome.texts)


def eight_logprobs(outcome: Outcome) -> None:
    assert outcome.error is None
    assert outcome.text == TEXT
    assert outcome.logprobs in (7, 8), (
        "one a token; whether the last, empty one has any is the engine's affair"
    )


def other_scripts(outcome: Outcome) -> None:
    chunks = [
        json.loads(line[6:]) for line in load("chat_stream_scripts").data.splitlines() if line[6:7] == b"{"
    ]
    assert outcome.error is None
    assert outcome.text == "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


def the_long_text(outcome: Outcome) -> None:
    assert outcome.error is None
    assert outcome.text == LONG


def fails(*, status: int | None = None, message: str = "") -> Check:
    """The user sees that it went wrong: the status if there is one, and the words."""

    def check(outcome: Outcome) -> None:
        assert outcome.error is not None, "passed for success"
        if status is not None:
            assert outcome.error["status"] == status
        assert message in outcome.error["message"]

    return check


def breaks_off(outcome: Outcome) -> None:
    fails()(outcome)
    assert "Paris" not in outcome.text
    assert outcome.error is not None
    assert "engine" in outcome.error["message"], (
        "the gateway's words, not the client's own trouble with the bytes"
    )


def lists_models(outcome: Outcome) -> None:
    assert outcome.models == ["smollm2-135m"]


# ---- answers ----


def pinging() -> Script:
    """Comments before the answer and in it."""
    reads = [read.data for read in load("chat_stream").reads]
    return raw([b": ping\n\n", b": ping\n\n", *(part for read in reads for part in (read, b": ping\n\n"))])


def one_long_event() -> Script:
    first, *_, last, done = load("chat_stream").reads
    chunk = json.loads(first.data.split(b"\n\n")[0][6:])
    chunk["choices"][0]["delta"]["content"] = LONG
    return raw([b"data: " + json.dumps(chunk).encode() + b"\n\n", last.data, done.data])


def stalls() -> Script:
    """Some chunks, and then silence with the connection open."""
    return Script(steps=[*(Send(read.data) for read in load("chat_stream").reads[:5]), Never()])


def slow() -> Script:
    """Two silences, before the first byte and after some chunks."""
    sends = [Send(read.data) for read in load("chat_stream_usage").reads]
    return Script(steps=[Pause(0.2), *sends[:4], Pause(0.2), *sends[4:]])


STREAM = {"stream": True}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TOOLS = as_recorded("chat_tool_call", "messages", "tools", "tool_choice", "max_tokens")
SCHEMA = as_recorded("chat_schema", "response_format")
TWO = {"n": 2, "temperature": 0.8, "max_tokens": 8}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
IMAGE = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this? \U0001f4f7"},
                {"type": "image_url", "image_url": {"url": PIXEL}},
            ],
        }
    ]
}
RUNNING_OUT = "Request running timeout reached."
BAD_TEMPERATURE = "temperature must be a non-negative finite number"

FEATURES = (
    Feature(
        name="models",
        title="list of models",
        op="models",
        check=lists_models,
        answer=recorded("models"),
        real=True,
    ),
    Feature(name="plain", title="whole answer", check=whole, answer=recorded("chat_plain"), real=True),
    Feature(
        name="stream", title="stream", check=in_pieces, answer=recorded("chat_stream"), body=STREAM, real=True
    ),
    Feature(
        name="usage",
        title="stream with usage",
        check=with_usage,
        answer=recorded("chat_stream_usage"),
        body=WITH_USAGE,
        real=True,
    ),
    Feature(
        name="tools",
        title="tool call",
        check=calls_the_tool,
        answer=recorded("chat_tool_call"),
        body=TOOLS,
        real=True,
    ),
    Feature(
        name="tools-stream",
        title="tool call, streamed",
        check=calls_the_tool,
        answer=recorded("chat_stream_tool_call"),
        body={**TOOLS, **STREAM},
        real=True,
    ),
    Feature(
        name="schema",
        title="JSON schema",
        op="parse",
        check=gives_the_city,
        answer=recorded("chat_schema"),
        body=SCHEMA,
        real=True,
    ),
    Feature(
        name="schema-stream",
        title="JSON schema, streamed",
        op="parse",
        check=gives_the_city,
        answer=recorded("chat_stream_schema"),
        body={**SCHEMA, **STREAM},
        real=True,
    ),
    Feature(name="n", title="n = 2", check=two_choices, answer=recorded("chat_n2"), body=TWO, real=True),
    Feature(
        name="n-stream",
        title="n = 2, streamed",
        check=two_choices,
        answer=recorded("chat_stream_n2"),
        body={**TWO, **STREAM},
        real=True,
    ),
    Feature(
        name="logprobs",
        title="logprobs",
        check=eight_logprobs,
        answer=recorded("chat_logprobs"),
        body=LOGPROBS,
        real=True,
    ),
    Feature(
        name="logprobs-stream",
        title="logprobs, streamed",
        check=eight_logprobs,
        answer=recorded("chat_stream_logprobs"),
        body={**LOGPROBS, **STREAM},
        real=True,
    ),
    Feature(
        name="image",
        title="image in a message",
        check=in_pieces,
        answer=recorded("chat_stream"),
        body={**IMAGE, **STREAM},
        real=True,
        check_real=fails(status=400, message="Model only supports text input"),
    ),
    Feature(
        name="scripts",
        title="Chinese, Greek, Russian, cut at every byte",
        check=other_scripts,
        answer=lambda: split_at(load("chat_stream_scripts"), range(len(load("chat_stream_scripts").data))),
        body=WITH_USAGE,
    ),
    Feature(
        name="crlf",
        title="engine with CRLF",
        check=whole,
        answer=lambda: crlf(load("chat_stream")),
        body=STREAM,
    ),
    Feature(
        name="long", title="one event of 200 kB", check=the_long_text, answer=one_long_event, body=STREAM
    ),
    Feature(name="ping", title="`: ping` in the stream", check=in_pieces, answer=pinging, body=STREAM),
    Feature(
        name="refused",
        title="engine refuses: status and words",
        check=fails(status=400, message=BAD_TEMPERATURE),
        answer=recorded("error_temperature"),
        body={**STREAM, "temperature": -1},
        as_direct=False,
        real=True,
    ),
    Feature(
        name="refused-plain",
        title="the same, not streamed",
        check=fails(status=400, message=BAD_TEMPERATURE),
        answer=recorded("error_temperature"),
        body={"temperature": -1},
        as_direct=False,
        real=True,
    ),
    Feature(
        name="dead",
        title="engine hangs up before it answers",
        check=fails(status=502, message="engine"),
        answer=broken("closes-at-once"),
        body=STREAM,
        as_direct=False,
    ),
    Feature(
        name="error-stream",
        title="error in the stream",
        check=fails(message=RUNNING_OUT),
        answer=recorded("chat_stream_error"),
        body=STREAM,
        as_direct=False,
    ),
    Feature(
        name="flat-error",
        title="error in the stream, the engine's flat form",
        check=fails(message="the engine gave up"),
        answer=broken("flat-error"),
        body=STREAM,
        as_direct=False,
    ),
    Feature(
        name="truncated",
        title="engine ends without `[DONE]`",
        check=breaks_off,
        answer=broken("ends-without-done"),
        body=STREAM,
        as_direct=False,
    ),
    Feature(
        name="closes",
        title="engine hangs up within an event",
        check=breaks_off,
        answer=broken("closes-mid-event"),
        body=STREAM,
        as_direct=False,
    ),
    Feature(
        name="resets",
        title="connection to the engine is reset",
        check=breaks_off,
        answer=broken("resets"),
        body=STREAM,
        as_direct=False,
    ),
)

LEAVES = Feature(
    name="leaves",
    title="user leaves: the engine stops",
    check=lambda _: None,
    answer=stalls,
    body=STREAM,
    real=True,
)
KEPT_ALIVE = tuple(
    Feature(
        name=f"keep-alive-{form}",
        title=f"the gateway's keep-alive: {form}",
        check=in_pieces,
        answer=slow,
        body=STREAM,
    )
    for form in ("comment", "chunk")
)
RETRIES = {
    status: Feature(
        name=f"retry-{status}",
        title=f"{status} with `Retry-After`: asked again, not earlier",
        check=whole,
        answer=recorded("chat_plain"),
    )
    for status in (429, 503)
}

ALL_FEATURES = (*FEATURES, LEAVES, *KEPT_ALIVE, *RETRIES.values())


def feature(name: str) -> Feature:
    """The feature of this name."""
    return next(known for known in ALL_FEATURES if known.name == name)


def scripts() -> dict[str, Script]:
    """How the replayed engine answers: by the feature's name, which is the model's."""
    answers = {known.name: known.answer() for known in (*FEATURES, LEAVES, *KEPT_ALIVE)}
    return {**answers, "/v1/models": answers["models"]}
