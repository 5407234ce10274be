"""The relay on real sockets, between a client and the replayed bytes of the real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import Close, Headers, ReplayEngine, Script, Send
from support.transcripts import load, names, streams
from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines import probe
from tokenflow_gateway.engines.engine import Engine

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.recordings(*names())
    scripts["/v1/models"] = scripts["models"]
    scripts["/model_info"] = Script(headers={"content-type": "application/json"}, steps=[Send(b"{}")])
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "id": "e", "link": "off"}) as gateway:
        yield gateway
        await gateway.everything_released()


def asks(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}


async def posts_of(engine: ReplayEngine) -> list[object]:
    """The requests that clients caused, without the health probe's."""
    return [seen for seen in engine.requests if seen.method == "POST"]


def without_usage(data: bytes) -> bytes:
    """What a client that did not ask for the usage event is to get of a recording."""
    events = data.split(b"\n\n")
    return b"\n\n".join(e for e in events if b'"choices":[],' not in e)


# ---- what passes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [t.name for t in streams() if t.path in {CHAT, "/v1/completions"} and "abort" not in t.name],
)
async def test_a_recorded_stream_arrives_byte_for_byte(gateway: RunningGateway, name: str) -> None:
    transcript = load(name)
    body = {**transcript.request_json(), "model": name}
    answer = await gateway.client.post(transcript.path, json=body)
    assert answer.status_code == 200
    wants_usage = (body.get("stream_options") or {}).get("include_usage")
    assert answer.content == (transcript.data if wants_usage else without_usage(transcript.data))


async def test_exact_counts_cost_the_client_nothing(gateway: RunningGateway) -> None:
    """The engine is asked for usage in each chunk: a client that did not ask sees none, all tokens count."""
    transcript = load("chat_stream_emoji_continuous")
    events = transcript.data.count(b'"content":"') - 1
    tokens = transcript.data.split(b'"completion_tokens":')[-1].partition(b",")[0]
    answer = await gateway.client.post(CHAT, json=asks(transcript.name))
    assert b"usage" in transcript.data
    assert b"usage" not in answer.content
    assert answer.content.startswith(transcript.data[: transcript.data.index(b',"usage"')])
    await gateway.everything_released()
    assert gateway.metric("tokenflow_delivered_tokens_total", engine="e") == float(tokens) > 2 * events


@pytest.mark.parametrize("name", [t.name for t in streams() if t.path not in {CHAT, "/v1/completions"}])
async def test_streams_of_other_routes_pass_through_untouched(gateway: RunningGateway, name: str) -> None:
    transcript = load(name)
    answer = await gateway.client.post(transcript.path, json={**transcript.request_json(), "model": name})
    assert answer.content == transcript.data
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_the_bytes_do_not_depend_on_how_they_are_cut(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    transcript = load("chat_stream_scripts")
    engine.scripts["bytewise"] = scenarios.split_at(transcript, range(len(transcript.data)))
    answer = await gateway.client.post(CHAT, json=asks("bytewise"))
    assert answer.content == without_usage(transcript.data)
    assert "\ufffd" not in answer.text


async def test_each_event_leaves_when_it_has_come(gateway: RunningGateway, engine: ReplayEngine) -> None:
    """The second event is not sent by the engine before the client has the first: nothing is held back."""
    transcript = load("chat_stream")
    gates = {number: asyncio.Event() for number in range(1, len(transcript.reads))}
    engine.scripts["gated"] = scenarios.replay(transcript, gates=gates)
    async with gateway.client.stream("POST", CHAT, json=asks("gated")) as answer:
        got = b""
        reads = answer.aiter_raw()
        for number, read in enumerate(transcript.reads):
            if gate := gates.get(number):
                gate.set()
            expected = without_usage(read.data)
            while len(expected) > 0 and not got.endswith(expected):
                got += await anext(reads)
    assert got == without_usage(transcript.data)


async def test_the_answers_headers_keep_proxies_from_buffering(gateway: RunningGateway) -> None:
    answer = await gateway.client.post(CHAT, json=asks("chat_stream"), headers={"x-request-id": "mine-1"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "mine-1"
    assert "content-length" not in answer.headers


@pytest.mark.parametrize("bad", ["", "a b", "x" * 200, "ü"])
async def test_a_request_id_that_cannot_be_logged_is_replaced(gateway: RunningGateway, bad: str) -> None:
    answer = await gateway.client.post(CHAT, json=asks("chat_stream"), headers={"x-request-id": bad.encode()})
    assert answer.headers["x-request-id"].startswith("req-")


async def test_a_plain_answer_is_relayed_and_counted(gateway: RunningGateway) -> None:
    transcript = load("chat_plain")
    answer = await gateway.client.post(CHAT, json=asks("chat_plain", stream=False))
    assert answer.content == transcript.data
    usage = json.loads(transcript.data)["usage"]
    await gateway.everything_released()
    assert gateway.metric("tokenflow_generated_tokens_total", engine="e") == usage["completion_tokens"]
    assert gateway.metric("tokenflow_prompt_tokens_total", engine="e") == usage["prompt_tokens"]


async def test_the_engine_gets_the_request_with_our_name_and_the_usage_we_count_by(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    body = asks("chat_stream", rid="forged", temperature=0.5, tools=[{"type": "function"}])
    await gateway.client.post(CHAT, json=body, headers={"authorization": "Bearer k", "cookie": "c=1"})
    (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
    sent = seen.json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert sent == {**body, "rid": sent["rid"], "stream_options": options}
    assert sent["rid"].startswith("tf-")
    assert seen.headers["authorization"] == "Bearer k"
    assert seen.headers["accept-encoding"] == "identity"
    assert "cookie" not in seen.headers


async def test_an_engines_own_key_replaces_the_clients(engine: ReplayEngine) -> None:
    async with running_gateway({"url": engine.base_url, "link": "off", "api_key": "engine-key"}) as gateway:
        await gateway.client.post(CHAT, json=asks("chat_stream"), headers={"authorization": "Bearer client"})
    (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
    assert seen.headers["authorization"] == "Bearer engine-key"
    assert all(
        s.headers["authorization"] == "Bearer engine-key" for s in engine.requests if s.path == "/v1/models"
    )


async def test_connections_to_the_engine_are_reused(gateway: RunningGateway, engine: ReplayEngine) -> None:
    for _ in range(5):
        await gateway.client.post(CHAT, json=asks("chat_stream"))
    assert len({seen.connection for seen in engine.requests if seen.path == CHAT}) == 1


async def test_tokens_are_counted_by_the_engines_usage(gateway: RunningGateway) -> None:
    transcript = load("chat_stream_usage")
    usage = json.loads(transcript.data.split(b'"usage":')[-1].partition(b"}\n\n")[0])
    await gateway.client.post(CHAT, json=asks("chat_stream_usage"))
    await gateway.everything_released()
    assert gateway.metric("tokenflow_delivered_tokens_total", engine="e") == usage["completion_tokens"]
    assert gateway.metric("tokenflow_time_to_first_token_seconds_count", engine="e") == 1


async def test_models_and_unknown_models(gateway: RunningGateway) -> None:
    listed = (await gateway.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    name = listed["data"][0]["id"]
    assert (await gateway.client.get(f"/v1/models/{name}")).json()["id"] == name
    missing = await gateway.client.get("/v1/models/none")
    assert missing.status_code == 404
    assert "no engine serves" in missing.json()["error"]["message"]


# ---- what is refused ----------------------------------------------------------------------------------


REFUSALS = [name for name in names() if load(name).status >= 400 and load(name).path != "/v1/messages"]


@pytest.mark.parametrize("name", REFUSALS)
async def test_the_engines_errors_come_out_in_openais_shape(gateway: RunningGateway, name: str) -> None:
    transcript = load(name)
    answer = await gateway.client.post(CHAT, json=asks(name))
    assert answer.status_code == transcript.status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    await gateway.everything_released()
    assert gateway.metric("tokenflow_aborts_total", outcome="unlinked") == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"{", "not valid JSON"), (b"[]", "must be a JSON object"), (b'{"stream": 1}', "`stream` must be")],
)
async def test_a_bad_body_is_400_and_never_reaches_the_engine(
    gateway: RunningGateway, engine: ReplayEngine, body: bytes, message: str
) -> None:
    answer = await gateway.client.post(CHAT, content=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert await posts_of(engine) == []


async def test_a_body_beyond_the_limit_is_413(engine: ReplayEngine) -> None:
    async with running_gateway({"url": engine.base_url, "link": "off"}, max_body_bytes=1000) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("chat_stream", pad="x" * 2000))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


async def test_unknown_routes_get_openais_shape(gateway: RunningGateway) -> None:
    answer = await gateway.client.get("/v2/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "no such route: GET /v2/nothing"
    wrong_method = await gateway.client.post("/health/live")
    assert wrong_method.status_code == 405
    assert "error" in wrong_method.json()


# ---- engines that fail ----------------------------------------------------------------------------------


def error_at_the_end(data: bytes) -> dict[str, object]:
    """The stream's error event, which has to be followed by ``[DONE]`` and nothing else."""
    assert data.endswith(DONE)
    assert data.count(DONE) == 1
    event = data.removesuffix(DONE).split(b"\n\n")[-2]
    error: dict[str, object] = json.loads(event.removeprefix(b"data: "))["error"]
    return error


async def test_no_engine_is_503_with_a_time_to_retry() -> None:
    async with running_gateway("http://127.0.0.1:9") as gateway:
        answer = await gateway.client.post(CHAT, json=asks("m"))
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        assert "connection refused" in answer.json()["error"]["message"]
        ready = await gateway.client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "no healthy engine"})
        assert (await gateway.client.get("/health/live")).status_code == 200


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (lambda t: scenarios.resets(t, after_reads=4), "engine_connection_lost"),
        (lambda t: scenarios.closes_mid_event(t, after_bytes=700), "engine_connection_lost"),
        (lambda t: scenarios.ends_without_done(t, after_reads=4), "stream_truncated"),
    ],
)
async def test_a_failure_inside_the_stream_is_an_error_event_after_whole_events(
    gateway: RunningGateway, engine: ReplayEngine, script: object, code: str
) -> None:
    transcript = load("chat_stream")
    engine.scripts["broken"] = script(transcript)  # type: ignore[operator]
    answer = await gateway.client.post(CHAT, json=asks("broken"))
    assert answer.status_code == 200
    assert error_at_the_end(answer.content)["code"] == code
    before = answer.content.removesuffix(DONE).rpartition(b"data: ")[0]
    assert before
    assert transcript.data.startswith(before)
    assert before.endswith(b"\n\n")


async def test_without_the_failure_there_is_no_error_event(gateway: RunningGateway) -> None:
    """The control of the test above: the same recording, whole."""
    answer = await gateway.client.post(CHAT, json=asks("chat_stream"))
    assert b'"error"' not in answer.content


async def test_a_failure_before_the_first_byte_is_a_status(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["closes"] = Script(steps=[Close()])
    answer = await gateway.client.post(CHAT, json=asks("closes"))
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "engine_connection_lost"


async def test_an_engines_500_keeps_its_status(gateway: RunningGateway, engine: ReplayEngine) -> None:
    engine.scripts["fails"] = scenarios.error_500()
    answer = await gateway.client.post(CHAT, json=asks("fails"))
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the engine gave up"


async def test_a_flat_error_inside_the_stream_is_wrapped(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["flat"] = scenarios.flat_error(load("chat_stream"), after_reads=4)
    answer = await gateway.client.post(CHAT, json=asks("flat"))
    assert error_at_the_end(answer.content)["message"] == "the engine gave up"
    await gateway.everything_released()
    assert gateway.metric("tokenflow_streams_ended_total", engine="e", route=CHAT, reason="engine_error") == 1


async def test_other_routes_break_in_their_own_dialect(gateway: RunningGateway, engine: ReplayEngine) -> None:
    engine.scripts["broken"] = scenarios.closes_mid_event(load("messages_stream"), after_bytes=300)
    answer = await gateway.client.post("/v1/messages", json={"model": "broken", "stream": True})
    assert answer.content.rpartition(b"event: error\n")[2].startswith(b'data: {"type":"error"')


async def test_a_document_that_breaks_is_never_whole(gateway: RunningGateway, engine: ReplayEngine) -> None:
    """A pass-through answer with a length, cut off after a part of it: the client must notice."""
    engine.scripts["/v1/embeddings"] = Script(
        headers={"content-type": "application/json", "content-length": "100"}, steps=[Send(b"{"), Close()]
    )
    with pytest.raises(httpx.RemoteProtocolError):
        await gateway.client.post("/v1/embeddings", json={"input": "x"})


@pytest.mark.parametrize("begins", [True, False])
async def test_a_silent_engine_meets_its_time_out(engine: ReplayEngine, *, begins: bool) -> None:
    engine.scripts["silent"] = scenarios.never_begins() if begins else scenarios.never_answers()
    limits = {"first_byte_s": 0.2, "idle_s": 60}
    async with running_gateway({"url": engine.base_url, "link": "off"}, timeouts=limits) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("silent"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "engine_first_byte_timeout")
        await gateway.everything_released()


async def test_an_engine_that_stops_in_the_middle_meets_the_idle_time_out(engine: ReplayEngine) -> None:
    engine.scripts["stops"] = scenarios.replay(load("chat_stream"), gates={3: asyncio.Event()})
    limits = {"first_byte_s": 60, "idle_s": 0.2}
    async with running_gateway({"url": engine.base_url, "link": "off"}, timeouts=limits) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("stops"))
        assert error_at_the_end(answer.content)["code"] == "engine_idle_timeout"


async def test_an_engine_that_keeps_its_side_open_after_done_holds_nobody_up(engine: ReplayEngine) -> None:
    transcript = load("chat_stream")
    engine.scripts["lingers"] = Script(
        steps=[*(Send(r.data) for r in transcript.reads), *scenarios.never_answers().steps]
    )
    async with running_gateway({"url": engine.base_url, "id": "e", "link": "off"}) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("lingers"))
        assert answer.content == without_usage(transcript.data)
        await gateway.everything_released()
        assert gateway.metric("tokenflow_streams_ended_total", engine="e", route=CHAT, reason="finished") == 1


async def test_done_is_added_where_only_it_is_missing(gateway: RunningGateway, engine: ReplayEngine) -> None:
    transcript = load("chat_stream")
    engine.scripts["no-done"] = scenarios.raw([transcript.data.removesuffix(DONE)])
    answer = await gateway.client.post(CHAT, json=asks("no-done"))
    assert answer.content == without_usage(transcript.data)


async def test_an_event_without_end_is_bounded(engine: ReplayEngine) -> None:
    engine.scripts["huge"] = scenarios.raw([b"data: " + b"x" * 5000 for _ in range(10)])
    async with running_gateway({"url": engine.base_url, "link": "off"}, max_event_bytes=8000) as gateway:
        answer = await gateway.client.post(CHAT, json=asks("huge"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_bad_stream")


async def test_a_request_that_the_engine_gave_up_is_an_error(gateway: RunningGateway) -> None:
    """Recorded after somebody's `/abort_request`: SGLang ends such a stream as if all were well."""
    answer = await gateway.client.post(CHAT, json=asks("chat_stream_abort"))
    assert error_at_the_end(answer.content)["code"] == "engine_aborted"
    await gateway.everything_released()
    assert gateway.metric("tokenflow_streams_ended_total", engine="e", route=CHAT, reason="engine_error") == 1


async def test_a_document_that_the_engine_gave_up_is_an_error(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    body = b'{"choices":[{"finish_reason":"abort","message":{"content":"half"}}]}'
    engine.scripts["given-up"] = document(body)
    answer = await gateway.client.post(CHAT, json=asks("given-up", stream=False))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_aborted")


def document(body: bytes, *, status: int = 200, **headers: str) -> Script:
    fields = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    return Script(status=status, headers=fields, steps=[Send(body)])


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_json_without_bottom_is_400_or_the_engines_business(
    gateway: RunningGateway, engine: ReplayEngine, path: str
) -> None:
    engine.scripts["/v1/embeddings"] = document(b"{}")
    body = b'{"model":"m","x":' + b"[" * 5000 + b"]" * 5000 + b"}"
    answer = await gateway.client.post(path, content=body, headers={"x-replay": path})
    assert answer.status_code == (400 if path == CHAT else 200)
    assert "x-request-id" in answer.headers


async def test_an_engine_cannot_lead_clients_around_the_gateway(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts[CHAT + "/"] = document(b"-", status=307, location=f"{engine.base_url}{CHAT}")
    headers = {"x-replay": CHAT + "/"}
    answer = await gateway.client.post(CHAT + "/", json=asks("chat_stream"), headers=headers)
    assert answer.status_code == 404
    assert "location" not in answer.headers


async def test_streams_of_other_routes_must_come_to_their_end(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    transcript = load("messages_stream")
    half = transcript.data[: transcript.data.index(b"\n\n") + 2]
    engine.scripts["half"] = scenarios.raw([half])
    answer = await gateway.client.post("/v1/messages", json={"model": "half", "stream": True})
    assert answer.content.startswith(half)
    assert b'"type":"error"' in answer.content.removeprefix(half)


async def test_a_fault_of_our_own_is_told_in_the_usual_form(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_model: str | None, **_how: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(gateway.app.registry, "serving", broken)
    answer = await gateway.client.post(CHAT, json=asks("m"))
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


async def test_one_engine_that_drips_holds_nobody_up(
    engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_TIMEOUT_S", 0.3)
    drip = Script(
        headers={"content-type": "text/plain"}, steps=[Send(b"x"), *scenarios.never_answers().steps]
    )
    async with ReplayEngine({"/ready": drip}) as slow:
        engines = [{"url": slow.base_url, "link": "off"}, {"url": engine.base_url, "link": "off"}]
        async with running_gateway(*engines) as gateway:
            assert (await gateway.client.post(CHAT, json=asks("chat_stream"))).status_code == 200
            reasons = {e.health_reason for e in gateway.app.registry if not e.healthy}
            assert reasons == {"no answer in time"}


async def test_an_engine_that_closes_kept_connections_is_well() -> None:
    """As uvicorn does with a connection that was idle for long, whatever has come on it meanwhile."""
    models = b'{"data": [{"id": "m"}]}'
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(models), models)
    serving = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await reader.read(1)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        engine = Engine(EngineConfig(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        async with httpx.AsyncClient() as client:
            health = probe.HealthProbe(engine, client)
            for _ in range(3):
                await health.probe()
                assert (engine.healthy, engine.health_reason) == (True, None)
        await asyncio.gather(*serving)
    assert len(serving) > 3


# ---- clients that leave ---------------------------------------------------------------------------------


async def test_a_client_that_leaves_in_the_middle_closes_the_engines_connection(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["endless"] = scenarios.endless(load("chat_stream"))
    async with gateway.client.stream("POST", CHAT, json=asks("endless")) as answer:
        await anext(answer.aiter_raw())
    (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
    async with asyncio.timeout(10):
        await seen.disconnected.wait()
    await gateway.everything_released()
    assert gateway.metric("tokenflow_streams_ended_total", engine="e", route=CHAT, reason="client_gone") == 1


@pytest.mark.parametrize(
    "script", [scenarios.never_answers(), Script(steps=[Headers(), *scenarios.never_begins().steps])]
)
async def test_a_client_that_leaves_before_the_first_byte_closes_it_too(
    gateway: RunningGateway, engine: ReplayEngine, script: Script
) -> None:
    engine.scripts["silent"] = script
    request = asyncio.create_task(gateway.client.post(CHAT, json=asks("silent")))
    await eventually(lambda: any(seen.path == CHAT for seen in engine.requests), "the engine has the request")
    (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
    request.cancel()
    async with asyncio.timeout(10):
        await seen.disconnected.wait()
    await gateway.everything_released()


async def test_an_unlinked_sglang_is_told_to_abort_by_http(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["endless"] = scenarios.endless(load("chat_stream"))
    assert next(iter(gateway.app.registry)).kind == "sglang"
    async with gateway.client.stream("POST", CHAT, json=asks("endless")) as answer:
        await anext(answer.aiter_raw())
    await eventually(
        lambda: any(seen.path == "/abort_request" for seen in engine.requests), "the engine was told"
    )
    (told,) = [seen for seen in engine.requests if seen.path == "/abort_request"]
    (asked,) = [seen for seen in engine.requests if seen.path == CHAT]
    assert told.json()["rid"] == asked.json()["rid"]
    await gateway.everything_released()
    assert gateway.metric("tokenflow_aborts_total", outcome="unlinked") == 1


async def test_a_client_that_stops_reading_stops_the_engines_bytes(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """Back-pressure reaches the engine: what lies in between is bounded, however long the client sleeps."""
    engine.scripts["endless"] = scenarios.endless(load("chat_stream"))
    async with gateway.client.stream("POST", CHAT, json=asks("endless")):
        (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
        before, still = -1, 0
        while still < 20:
            await asyncio.sleep(0.01)
            still = still + 1 if seen.sent_bytes == before else 0
            before = seen.sent_bytes
            assert before < 64 * 1024 * 1024


async def test_many_aborted_streams_exhaust_nothing(gateway: RunningGateway, engine: ReplayEngine) -> None:
    engine.scripts["endless"] = scenarios.endless(load("chat_stream"))

    async def leave_early() -> None:
        async with gateway.client.stream("POST", CHAT, json=asks("endless")) as answer:
            await anext(answer.aiter_raw())

    for _ in range(5):
        await asyncio.gather(*(leave_early() for _ in range(20)))
    answer = await gateway.client.post(CHAT, json=asks("chat_stream"))
    assert answer.content.endswith(DONE)


# ---- shutdown -------------------------------------------------------------------------------------------


async def test_shutdown_takes_readiness_away_and_ends_streams_with_an_error_event(
    engine: ReplayEngine,
) -> None:
    hold = asyncio.Event()
    engine.scripts["held"] = scenarios.replay(load("chat_stream"), gates={3: hold})
    async with running_gateway({"url": engine.base_url, "link": "off"}, shutdown_grace_s=0) as gateway:
        async with gateway.client.stream("POST", CHAT, json=asks("held")) as answer:
            reads = answer.aiter_raw()
            got = await anext(reads)
            gateway.server.should_exit = True
            async for read in reads:
                got += read
        assert error_at_the_end(got)["code"] == "gateway_shutdown"


async def test_running_streams_finish_within_the_grace(engine: ReplayEngine) -> None:
    hold = asyncio.Event()
    transcript = load("chat_stream")
    engine.scripts["held"] = scenarios.replay(transcript, gates={3: hold})
    async with (
        running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
        gateway.client.stream("POST", CHAT, json=asks("held")) as answer,
    ):
        reads = answer.aiter_raw()
        got = await anext(reads)
        gateway.server.should_exit = True
        hold.set()
        async for read in reads:
            got += read
    assert got == without_usage(transcript.data)
