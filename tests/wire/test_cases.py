"""Faults that other gateways have shipped, by the numbers of docs/wire.md: bytes in, bytes out, on sockets.

These are the cases of what an engine sends. Those of time, failover and shutdown, and those of clients that
leave or stop reading, are beside this module; the table in docs/wire.md says where.
"""

from __future__ import annotations

import ast
import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

import tokenflow_gateway
from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import Close, Headers, Hold, Pause, ReplayEngine, Reset, Script, Send, Step
from support.transcripts import load
from support.wire import DONE, Received, check_profile, event, text_chunk, usage_chunk

CHAT = "/v1/chat/completions"
STREAM = {"content-type": "text/event-stream"}
BOM = b"\xef\xbb\xbf"
PLAIN = load("chat_stream").data
FINISH = text_chunk(None, finish="stop")
ANSWER = text_chunk("", role="assistant") + text_chunk("Par") + text_chunk("is")


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.sglang("chat_stream")
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "id": "e", "link": "off"}) as gateway:
        yield gateway
        await gateway.everything_released()


def asks(model: str = "case", **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}


async def answer_to(gateway: RunningGateway, engine: ReplayEngine, script: Script, **fields: object) -> bytes:
    """What the client gets, byte for byte, where the engine answers by this script."""
    engine.scripts["case"] = script
    async with gateway.client.stream("POST", CHAT, json=asks(**fields)) as answer:
        assert answer.status_code == 200
        return b"".join([part async for part in answer.aiter_raw()])


async def relayed(
    gateway: RunningGateway, engine: ReplayEngine, *parts: bytes, json_only: bool = True, **fields: object
) -> tuple[bytes, Received]:
    """The answer to an engine that sends these parts, and what a client understands of it."""
    body = await answer_to(gateway, engine, scenarios.raw(parts), **fields)
    return body, check_profile(body, json_only=json_only)


def in_reads(parts: Iterable[bytes]) -> Script:
    """Parts far enough apart that the gateway reads each by itself."""
    return Script(steps=[step for part in parts for step in (Send(part), Pause(0.005))])


def ended(gateway: RunningGateway, reason: str) -> float:
    return gateway.metric("tokenflow_streams_ended_total", engine="e", route=CHAT, reason=reason)


# ---- bytes and lines --------------------------------------------------------------------------------------


async def test_case_01_a_character_split_between_two_reads(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    data = text_chunk("é😀語") + FINISH + DONE
    begin, end = data.index("é".encode()), data.index("語".encode()) + 3
    for cut in range(begin + 1, end):
        body = await answer_to(gateway, engine, in_reads([data[:cut], data[cut:]]))
        assert body == data
        assert check_profile(body).text == "é😀語"


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("cut", [1, 2])
async def test_case_02_the_usage_cut_before_its_blank_line(
    gateway: RunningGateway, engine: ReplayEngine, *, wanted: bool, cut: int
) -> None:
    sent = ANSWER + FINISH + usage_chunk(17)[:-cut]
    body, _ = await relayed(gateway, engine, sent, stream_options={"include_usage": wanted})
    assert body == ANSWER + FINISH + (usage_chunk(17) if wanted else b"") + DONE
    assert gateway.metric("tokenflow_generated_tokens_total", engine="e") == 17


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("head", [b"data: ", b"data:"], ids=["space", "no-space"])
async def test_case_03_every_line_end_with_and_without_a_space(
    gateway: RunningGateway, engine: ReplayEngine, end: bytes, head: bytes
) -> None:
    sent = PLAIN.replace(b"data: ", head).replace(b"\n", end)
    for script in (scenarios.raw([sent]), in_reads([sent[:699], sent[699:]])):
        body = await answer_to(gateway, engine, script)
        assert body == PLAIN
        check_profile(body)


async def test_case_03_a_lone_cr_and_its_lf_in_two_reads(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """A CR that may be half of a CRLF, wherever the reads meet."""
    sent = (text_chunk("a") + FINISH + DONE).replace(b"\n", b"\r\n")
    cuts = [at + 1 for at, byte in enumerate(sent) if byte == 0x0D]
    for cut in cuts:
        body = await answer_to(gateway, engine, in_reads([sent[:cut], sent[cut:]]))
        assert body == text_chunk("a") + FINISH + DONE, cut


async def test_case_04_a_byte_order_mark(gateway: RunningGateway, engine: ReplayEngine) -> None:
    """Once, also in three reads; a second mark makes its line one that says nothing."""
    body, _ = await relayed(gateway, engine, BOM + PLAIN)
    assert body == PLAIN
    assert await answer_to(gateway, engine, in_reads([BOM[:1], BOM[1:2], BOM[2:] + PLAIN])) == PLAIN
    body, got = await relayed(
        gateway, engine, BOM + BOM + text_chunk("lost") + text_chunk("a") + FINISH + DONE
    )
    assert got.text == "a"


async def test_case_05_one_json_over_two_lines(gateway: RunningGateway, engine: ReplayEngine) -> None:
    """Joined as the standard has it, and handed on as one line: some clients read line by line."""
    first, second = b'{"choices":[{"index":0,', b'"delta":{"content":"a"},"finish_reason":null}]}'
    body, got = await relayed(gateway, engine, b"data: %b\ndata: %b\n\n" % (first, second), FINISH, DONE)
    assert body == b"data: %b %b\n\n" % (first, second) + FINISH + DONE
    assert got.text == "a"


async def test_case_05_a_name_belongs_to_its_event(gateway: RunningGateway, engine: ReplayEngine) -> None:
    """In the dialects that have names it stays with its event; a chat's client is to see none."""
    body, _ = await relayed(gateway, engine, b"event: x\n" + text_chunk("a") + FINISH + DONE)
    assert body == text_chunk("a") + FINISH + DONE
    transcript = load("messages_stream")
    engine.scripts["names"] = in_reads([transcript.data[:14], transcript.data[14:]])
    answer = await gateway.client.post(transcript.path, json=asks("names"))
    assert answer.content == transcript.data


async def test_case_06_a_text_about_the_end(gateway: RunningGateway, engine: ReplayEngine) -> None:
    """A model that writes ``data: [DONE]`` ends nothing."""
    parts = [text_chunk("data: [DONE]"), text_chunk("[DONE]"), text_chunk("data: [DONE]\n\n"), FINISH, DONE]
    body, got = await relayed(gateway, engine, *parts)
    assert body == b"".join(parts)
    assert got.text == "data: [DONE][DONE]data: [DONE]\n\n"


@pytest.mark.parametrize(
    "tail", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n", DONE, DONE + DONE, b"data:[DONE]", b""]
)
async def test_case_07_exactly_one_done(gateway: RunningGateway, engine: ReplayEngine, tail: bytes) -> None:
    body, _ = await relayed(gateway, engine, ANSWER + FINISH, *filter(None, [tail]))
    assert body == ANSWER + FINISH + DONE
    assert ended(gateway, "finished") == 1


@pytest.mark.parametrize(
    "sent",
    [
        ANSWER,
        ANSWER + usage_chunk(2),
        ANSWER + FINISH[:-40],
        ANSWER + b"data: [DO",
        text_chunk("", role="assistant"),
    ],
    ids=["no-finish", "usage-only", "half-an-event", "half-a-done", "role-only"],
)
async def test_case_08_a_stream_without_its_end(
    gateway: RunningGateway, engine: ReplayEngine, sent: bytes
) -> None:
    body, got = await relayed(gateway, engine, sent)
    assert got.error is not None
    assert got.error["code"] == "stream_truncated"
    assert (ANSWER + usage_chunk(2)).startswith(body.rpartition(b'data: {"error"')[0])
    assert ended(gateway, "truncated") == 1
    assert ended(gateway, "finished") == 0


async def test_case_08_one_of_two_choices_without_its_end(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    second = event({"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": None}]})
    _, got = await relayed(gateway, engine, text_chunk("a"), second, FINISH)
    assert got.error is not None
    _, whole = await relayed(gateway, engine, text_chunk("a"), second, FINISH, FINISH.replace(b":0", b":1"))
    assert whole.error is None


async def test_case_09_comments_and_fields_that_break_clients(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """Comments anywhere, and what crashes one SDK or another: none of it arrives."""
    odd = [
        b": processing\n\n",
        b":\n\n",
        b"retry: 1000\n\n",
        b"id: 7\n\n",
        b"data: \n\n",
        b"data\n\n",
        b"\n\n",
    ]
    inside = (
        b": half\nid: 3\nretry: 1\nevent: message\n" + text_chunk("b").removesuffix(b"\n") + b": behind\n\n"
    )
    parts = [*odd, text_chunk("a"), *odd, inside, *odd, FINISH, *odd, DONE]
    body, got = await relayed(gateway, engine, *parts)
    assert body == text_chunk("a") + text_chunk("b") + FINISH + DONE
    assert got.text == "ab"


# ---- usage, and what stands beside text -------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"include_usage": False}, {"include_usage": None}, {}, None])
async def test_case_12_usage_that_the_client_refused(
    gateway: RunningGateway, engine: ReplayEngine, options: object
) -> None:
    """The engine is asked for it, the gateway counts by it, the client sees nothing of it."""
    parts = [ANSWER, FINISH, usage_chunk(17), DONE]
    body, _ = await relayed(gateway, engine, *parts, stream_options=options)
    assert body == ANSWER + FINISH + DONE
    (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
    assert seen.json()["stream_options"]["include_usage"] is True
    assert gateway.metric("tokenflow_generated_tokens_total", engine="e") == 17


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
        {"choices": [], "usage": None},
        {"choices": [], "usage": {}},
        {"choices": [], "usage": {"prompt_tokens": 5.0, "completion_tokens": None, "extra": [1]}},
        {"choices": [], "prompt_filter_results": []},
        {"choices": []},
    ],
)
@pytest.mark.parametrize("wanted", [True, False])
async def test_case_13_chunks_without_choices(
    gateway: RunningGateway, engine: ReplayEngine, odd: dict[str, object], *, wanted: bool
) -> None:
    """First, in the middle, last: no crash anywhere, and removed only if it is the usage nobody asked for."""
    chunk = event(odd)
    parts = [chunk, text_chunk("a"), chunk, FINISH, chunk, DONE]
    body, got = await relayed(gateway, engine, *parts, stream_options={"include_usage": wanted})
    kept = b"" if odd.get("usage") is not None and not wanted else chunk
    assert body == kept + text_chunk("a") + kept + FINISH + kept + DONE
    assert got.text == "a"


async def test_case_14_two_tool_calls_with_one_index(gateway: RunningGateway, engine: ReplayEngine) -> None:
    calls = [
        {"index": 0, "id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("a", "b")
    ]
    parts = [text_chunk(None, tool_calls=calls), text_chunk(None, finish="tool_calls"), DONE]
    body, _ = await relayed(gateway, engine, *parts)
    assert body == b"".join(parts)


def test_case_16_nothing_wraps_the_stream_in_tasks_and_queues() -> None:
    """``BaseHTTPMiddleware`` holds streams back and hides clients that leave: the source has none of it."""
    package = Path(tokenflow_gateway.__file__).parent
    names = {
        getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    }
    assert "CORSMiddleware" in names  # the control: names are found, imported ones too
    assert not {"BaseHTTPMiddleware", "middleware"} & names


# ---- headers and encodings of the engine -------------------------------------------------------------------


async def test_case_20_a_length_on_a_stream_is_not_passed_on(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["case"] = Script(
        headers={**STREAM, "content-length": str(len(PLAIN))}, steps=[Send(PLAIN)]
    )
    async with gateway.client.stream("POST", CHAT, json=asks()) as answer:
        body = b"".join([part async for part in answer.aiter_raw()])
    assert "content-length" not in answer.headers
    assert answer.headers.get_list("transfer-encoding") == ["chunked"]
    assert body == PLAIN


@pytest.mark.parametrize(("encoding", "window_bits"), [("gzip", 31), ("deflate", 15)])
async def test_case_20_a_compressed_stream_is_decoded_as_it_comes(
    gateway: RunningGateway, engine: ReplayEngine, encoding: str, window_bits: int
) -> None:
    """Asked for none, an engine that compresses all the same holds nothing up."""
    squeeze = zlib.compressobj(wbits=window_bits)
    more = asyncio.Event()
    first = squeeze.compress(ANSWER) + squeeze.flush(zlib.Z_SYNC_FLUSH)
    rest = squeeze.compress(FINISH + DONE) + squeeze.flush()
    headers = {**STREAM, "content-encoding": encoding}
    engine.scripts["case"] = Script(headers=headers, steps=[Send(first), Hold(more), Send(rest)])
    async with gateway.client.stream("POST", CHAT, json=asks()) as answer:
        assert "content-encoding" not in answer.headers
        body = b""
        async for part in answer.aiter_raw():
            body += part
            if body == ANSWER:
                more.set()
    assert body == ANSWER + FINISH + DONE
    (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
    assert seen.headers["accept-encoding"] == "identity"


async def test_case_20_what_claims_to_be_compressed_and_is_not(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    engine.scripts["case"] = Script(headers={**STREAM, "content-encoding": "gzip"}, steps=[Send(PLAIN)])
    answer = await gateway.client.post(CHAT, json=asks())
    assert answer.status_code == 502 or check_profile(answer.content).error is not None


# ---- sizes -------------------------------------------------------------------------------------------------


async def test_case_21_a_line_of_200_kb(gateway: RunningGateway, engine: ReplayEngine) -> None:
    large = text_chunk("x" * 200_000)
    body, _ = await relayed(gateway, engine, text_chunk("a"), large, FINISH, DONE)
    assert body == text_chunk("a") + large + FINISH + DONE


async def test_case_21_the_cap_is_configurable_and_says_so(engine: ReplayEngine) -> None:
    async with running_gateway({"url": engine.base_url, "link": "off"}, max_event_bytes=100_000) as gateway:
        _, got = await relayed(gateway, engine, text_chunk("a"), text_chunk("x" * 200_000), FINISH, DONE)
        await gateway.everything_released()
    assert got.text == "a"
    assert got.error is not None
    assert got.error["code"] == "engine_bad_stream"
    assert "longer than 100000 bytes" in got.error["message"]


# ---- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps",
    [[Close()], [Reset()], [Headers(), Close()], [Headers(), Reset()], [Send(b": wait\n\n"), Close()]],
    ids=["closes", "resets", "closes-after-its-head", "resets-after-its-head", "closes-after-a-comment"],
)
async def test_case_24_a_failure_before_content_is_a_status(
    gateway: RunningGateway, engine: ReplayEngine, steps: list[Step]
) -> None:
    engine.scripts["case"] = Script(steps=steps)
    answer = await gateway.client.post(CHAT, json=asks())
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "engine_connection_lost"


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_case_24_an_engines_refusal_keeps_its_status(
    gateway: RunningGateway, engine: ReplayEngine, status: int
) -> None:
    body = json.dumps({"object": "error", "message": "no", "code": status}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    engine.scripts["case"] = Script(status=status, headers=headers, steps=[Send(body)])
    answer = await gateway.client.post(CHAT, json=asks())
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, "no")


@pytest.mark.parametrize("last", [Close(), Reset()], ids=["closes", "resets"])
async def test_case_24_a_failure_after_content_is_an_error_event(
    gateway: RunningGateway, engine: ReplayEngine, last: Close | Reset
) -> None:
    """Behind all text that came; never a stream that just stops."""
    gate = asyncio.Event()
    steps = [Send(ANSWER + FINISH[:30]), Hold(gate), last]
    engine.scripts["case"] = Script(steps=steps)
    async with gateway.client.stream("POST", CHAT, json=asks()) as answer:
        body = b""
        async for part in answer.aiter_raw():
            body += part
            if body == ANSWER:
                gate.set()
    assert body.startswith(ANSWER)
    error = check_profile(body).error
    assert error is not None
    assert error["code"] == "engine_connection_lost"
    await eventually(lambda: ended(gateway, "engine_lost") == 1, "counted as lost")


@pytest.mark.parametrize(("code", "status"), [(400, 400), (503, 503), ("word", 502), (None, 502)])
async def test_case_24_an_error_as_the_first_event_is_a_status(
    gateway: RunningGateway, engine: ReplayEngine, code: object, status: int
) -> None:
    """SGLang has begun its 200 when it finds a prompt too long: the client gets what that means."""
    error = {
        "error": {"object": "error", "message": "m", "type": "BadRequestError", "param": None, "code": code}
    }
    engine.scripts["case"] = scenarios.raw([b": wait\n\n", event(error), DONE])
    answer = await gateway.client.post(CHAT, json=asks())
    assert (answer.status_code, answer.json()) == (status, error)
    assert ended(gateway, "engine_error") == 1


async def test_case_24_an_error_inside_the_stream_is_its_end(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    """In whatever shape, with or without the end behind it; text behind it is not passed on."""
    for error in (
        {"error": {"message": "m"}},
        {"error": "m"},
        {"object": "error", "message": "m", "code": 500},
    ):
        for behind in ([], [DONE], [text_chunk("late"), DONE], [event({"error": {"message": "second"}})]):
            body, got = await relayed(gateway, engine, ANSWER, event(error), *behind)
            assert got.error is not None
            assert got.error["message"] == "m"
            assert got.text == "Paris"
            assert body.startswith(ANSWER)
