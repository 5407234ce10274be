"""``/v1/messages`` and ``/v1/responses`` on sockets: followed as chats are, and broken in their own words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest
from anthropic import APIStatusError as AnthropicError
from anthropic import AsyncAnthropic
from anthropic import BadRequestError as AnthropicBadRequest
from openai import APIError as OpenAIError
from openai import AsyncOpenAI

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.plugin_stand_in import PluginStandIn
from support.replay_engine import ReplayEngine, Script, Send
from support.transcripts import load, names


class Case(NamedTuple):
    path: str
    name: str
    tokens: int
    """Of the answer, by the engine's usage."""
    prompt: int
    ended: str


MESSAGES = Case("/v1/messages", "messages_stream", 8, 37, "finished")
RESPONSES = Case("/v1/responses", "responses_stream", 3, 37, "engine_error")
BOTH = pytest.mark.parametrize("case", [MESSAGES, RESPONSES], ids=["messages", "responses"])


def document(body: bytes, *, status: int = 200) -> Script:
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    return Script(status=status, headers=headers, steps=[Send(body)])


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    """Answers as SGLang, which is what has our names for requests."""
    scripts = scenarios.recordings(*names())
    scripts["/v1/models"] = scripts["models"]
    scripts["/model_info"] = document(b"{}")
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "id": "e", "link": "off"}) as gateway:
        yield gateway
        await gateway.everything_released()


def asks(case: Case, model: str | None = None, **fields: object) -> dict[str, Any]:
    body: dict[str, Any] = load(case.name).request_json()
    return {**body, "model": model or case.name, **fields}


def last_event(data: bytes) -> tuple[str, dict[str, Any]]:
    """Name and data of the event that ends a stream."""
    name, line = data.decode().rstrip().split("\n\n")[-1].split("\n")
    return name.removeprefix("event: "), json.loads(line.removeprefix("data: "))


@BOTH
async def test_a_stream_arrives_byte_for_byte_however_it_is_cut(
    gateway: RunningGateway, engine: ReplayEngine, case: Case
) -> None:
    transcript = load(case.name)
    engine.scripts["bytewise"] = scenarios.split_at(transcript, range(len(transcript.data)))
    for model in (case.name, "bytewise"):
        answer = await gateway.client.post(case.path, json=asks(case, model))
        assert answer.content == transcript.data
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


@BOTH
async def test_a_stream_is_counted_by_the_engines_usage(gateway: RunningGateway, case: Case) -> None:
    await gateway.client.post(case.path, json=asks(case))
    await gateway.everything_released()
    for kind, count in (("generated", case.tokens), ("delivered", case.tokens), ("prompt", case.prompt)):
        assert gateway.metric(f"tokenflow_{kind}_tokens_total", engine="e") == count, kind
    labels = {"engine": "e", "route": case.path, "reason": case.ended}
    assert gateway.metric("tokenflow_streams_ended_total", **labels) == 1
    assert gateway.metric("tokenflow_responses_total", route=case.path, status="200") == 1


@pytest.mark.parametrize(("case", "tokens"), [(MESSAGES, 9), (RESPONSES, 9)])
async def test_a_document_is_counted_too(
    gateway: RunningGateway, engine: ReplayEngine, case: Case, tokens: int
) -> None:
    plain = b'{ "type":"message","usage":{"input_tokens":4,"output_tokens":9}}'
    engine.scripts["plain"] = document(plain)
    answer = await gateway.client.post(case.path, json=asks(case, "plain", stream=False))
    assert answer.content == plain
    assert gateway.metric("tokenflow_generated_tokens_total", engine="e") == tokens
    assert gateway.metric("tokenflow_prompt_tokens_total", engine="e") == 4


@BOTH
async def test_the_engine_knows_the_request_by_the_name_the_plugin_hears(
    engine: ReplayEngine, case: Case
) -> None:
    """Opened on the link, named to the engine, closed on the link: by one name, which clients cannot give."""
    with PluginStandIn(engine.base_url) as plugin:
        async with running_gateway({"url": engine.base_url, "id": "e"}) as gateway:
            linked = next(iter(gateway.app.registry))
            await eventually(lambda: linked.linked, "the link is up")
            before = len(engine.requests)
            body = asks(case, **({"request_id": "mine"} if case is RESPONSES else {}))
            answer = await gateway.client.post(case.path, json=body, headers={"x-override-rid": "mine"})
            rid = answer.headers["x-tokenflow-stream"].partition(".")[0]
            await gateway.everything_released()
            seen = next(seen for seen in engine.requests[before:] if seen.path == case.path)
            named = seen.json()["request_id"] if case is RESPONSES else seen.headers["x-override-rid"]
            assert named == rid
            assert plugin.opened == [rid]
            assert plugin.closed == {rid: case.ended}
            assert ("x-override-rid" in seen.headers) == (case is MESSAGES)


async def test_a_message_goes_to_the_engine_as_the_bytes_it_came_in(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    body = b'{ "model" : "messages_stream", "stream":true,\n "max_tokens": 1e1, "x": {"a":1,"a":2} }'
    await gateway.client.post("/v1/messages", content=body)
    assert engine.requests[-1].body == body


async def test_what_runs_in_the_background_has_a_name_of_the_gateways(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["queued"] = document(b'{"status":"queued"}')
    body = asks(RESPONSES, "queued", stream=False, background=True, request_id="mine")
    answer = await gateway.client.post("/v1/responses", json=body)
    assert answer.json() == {"status": "queued"}
    assert engine.requests[-1].json()["request_id"].startswith("resp_")
    assert gateway.metric("tokenflow_aborts_total", outcome="unlinked") == 0


@BOTH
async def test_progress_reports_are_taken(gateway: RunningGateway, engine: ReplayEngine, case: Case) -> None:
    async with gateway.client.stream("POST", case.path, json=asks(case)) as answer:
        rid, capability = answer.headers["x-tokenflow-stream"].split(".")
        await answer.aread()
        report = {"capability": capability, "reports": [{"seq": 1, "tokens": 2}]}
        taken = await gateway.client.post(f"/v1/streams/{rid}/progress", json=report)
        assert (taken.status_code, taken.json()["consumed"]) == (200, 2.0)


# ---- what goes wrong ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("fault", "code"), [("closes", "engine_connection_lost"), ("ends", "stream_truncated")]
)
async def test_a_stream_that_breaks_ends_in_an_error_of_its_dialect(
    gateway: RunningGateway, engine: ReplayEngine, case: Case, fault: str, code: str
) -> None:
    transcript = load(case.name)
    kept = 6
    whole = b"".join(read.data for read in transcript.reads[:kept])
    engine.scripts["broken"] = (
        scenarios.closes_mid_event(transcript, after_bytes=len(whole) + 20)
        if fault == "closes"
        else scenarios.ends_without_done(transcript, after_reads=kept)
    )
    answer = await gateway.client.post(case.path, json=asks(case, "broken"))
    assert answer.content.startswith(whole)
    name, data = last_event(answer.content)
    assert (name, data["type"], data["error"]["code"]) == ("error", "error", code)
    if case is RESPONSES:
        assert data["sequence_number"] == kept
    assert answer.content.count(b"event: error") == 1


@BOTH
async def test_an_engines_refusal_is_told_in_the_dialect(
    gateway: RunningGateway, engine: ReplayEngine, case: Case
) -> None:
    engine.scripts["no"] = document(b'{"object":"error","message":"too long","code":400}', status=400)
    answer = await gateway.client.post(case.path, json=asks(case, "no"))
    error = answer.json()
    assert (answer.status_code, error["error"]["message"]) == (400, "too long")
    assert (error.get("type") == "error") == (case is MESSAGES)


async def test_a_refusal_that_is_anthropics_already_stays_as_it_came(gateway: RunningGateway) -> None:
    answer = await gateway.client.post("/v1/messages", json=asks(MESSAGES, "error_messages"))
    assert (answer.status_code, answer.content) == (400, load("error_messages").data)


@BOTH
async def test_a_bad_body_is_told_in_the_dialect(gateway: RunningGateway, case: Case) -> None:
    answer = await gateway.client.post(case.path, content=b'{"model": "m",')
    error = answer.json()
    assert (answer.status_code, error["error"]["code"]) == (400, "invalid_request")
    assert "line 1, column 15" in error["error"]["message"]
    assert (error.get("type") == "error") == (case is MESSAGES)


# ---- what real clients make of it -------------------------------------------------------------------------


@pytest.fixture
async def anthropics(gateway: RunningGateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.base_url, api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
async def openais(gateway: RunningGateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway.base_url}/v1", api_key="x", max_retries=0) as client:
        yield client


async def test_anthropics_sdk_reads_a_message_and_raises_what_went_wrong(
    anthropics: AsyncAnthropic, engine: ReplayEngine
) -> None:
    transcript = load("messages_stream")
    engine.scripts["broken"] = scenarios.closes_mid_event(transcript, after_bytes=900)

    async def message(model: str) -> Any:
        messages: Any = [{"role": "user", "content": "hi"}]
        async with anthropics.messages.stream(model=model, max_tokens=16, messages=messages) as stream:
            return await stream.get_final_message()

    whole = await message("messages_stream")
    assert (whole.content[0].text, whole.usage.output_tokens) == ("The capital of France is Paris.", 8)
    with pytest.raises(AnthropicError, match="the connection to the engine was lost"):
        await message("broken")
    with pytest.raises(AnthropicBadRequest, match="max_tokens must be positive"):
        await message("error_messages")


async def test_openais_sdk_reads_a_response_and_raises_what_went_wrong(
    openais: AsyncOpenAI, engine: ReplayEngine
) -> None:
    transcript = load("responses_stream_completed")
    engine.scripts["broken"] = scenarios.closes_mid_event(transcript, after_bytes=2500)

    async def response(model: str) -> Any:
        async with openais.responses.stream(model=model, input="hi") as stream:
            return await stream.get_final_response()

    assert (await response(transcript.name)).output_text == "The capital of France is Paris."
    with pytest.raises(OpenAIError, match="the connection to the engine was lost"):
        await response("broken")


@BOTH
async def test_a_client_that_leaves_closes_the_engines_connection(
    gateway: RunningGateway, engine: ReplayEngine, case: Case
) -> None:
    engine.scripts["endless"] = scenarios.endless(load(case.name))
    async with gateway.client.stream("POST", case.path, json=asks(case, "endless")) as answer:
        await anext(answer.aiter_raw())
    seen = next(seen for seen in engine.requests if seen.path == case.path)
    await eventually(seen.disconnected.is_set, "the engine's connection is closed")


@BOTH
async def test_a_paced_stream_loses_nothing(gateway: RunningGateway, case: Case) -> None:
    headers = {"x-tokenflow-delivery": "paced", "x-tokenflow-rate": "1000"}
    answer = await gateway.client.post(case.path, json=asks(case), headers=headers)
    assert answer.content == load(case.name).data


async def test_errors_of_other_routes_keep_openais_shape(gateway: RunningGateway) -> None:
    answer: httpx.Response = await gateway.client.post("/v1/chat/completions", content=b"[]")
    assert set(answer.json()) == {"error"}
