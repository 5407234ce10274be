"""Streams and requests drawn at random: two seconds of each kind here, longer by `make fuzz`.

A failure names its case, and ``TOKENFLOW_FUZZ_CASE=reader:SEED:NUMBER`` runs that one alone. What was found
is kept in `FOUND`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from random import Random

import httptools
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import scenarios
from support.fuzz_answers import OddAnswer, odd_answer
from support.fuzz_requests import odd_connection
from support.fuzz_streams import OPENAI, check_meter, check_reader, check_stream, client_bytes
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import ReplayEngine
from support.wire import DONE, check_profile, event, text_chunk, usage_chunk

SECONDS = float(os.environ.get("TOKENFLOW_FUZZ_S", "2"))
SEED = os.environ.get("TOKENFLOW_FUZZ_SEED", "0")
CHECKS: dict[str, Callable[[Random], None]] = {"reader": check_reader, "meter": check_meter}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
FOUND = {
    "a negative count": (CHAT, text_chunk("a") + usage_chunk(-5) + DONE),
    "a count beyond all bounds": (CHAT, text_chunk("a") + usage_chunk(2**70) + DONE),
    "an error that says nothing": (CHAT, text_chunk("a") + event({"error": {}})),
    "another shape, and then no JSON": (MESSAGES, b'data: {"index":0,"x":{}}}\n\n'),
}
"""Streams that failed once, made small."""
FAULTS = {500, 504}
"""A fault of ours, and an engine that was waited for in vain: nobody here is to see one."""


def drawn(name: object) -> Random:
    """The draws of one case, the same each time."""
    return Random(str(name))  # noqa: S311 - chance that can be repeated is what is wanted


def case(name: str) -> None:
    """Run one case by its name, ``KIND:SEED:NUMBER``."""
    CHECKS[name.partition(":")[0]](drawn(name))


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("kind", CHECKS)
def test_streams_at_random(kind: str) -> None:
    end, count = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        name = f"{kind}:{SEED}:{count}"
        try:
            case(name)
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error
        count += 1
    print(f"\n{kind}: {count} executions in {SECONDS:g} s, seed {SEED}")  # noqa: T201 - what `make fuzz` shows
    assert count > 10 * SECONDS


@pytest.mark.parametrize(("path", "stream"), FOUND.values(), ids=FOUND)
def test_what_was_found_stays_right(path: str, stream: bytes) -> None:
    reads = [stream[at : at + 1] for at in range(len(stream))]
    for wants_usage in (False, True):
        check_stream(path, stream, reads, wants_usage=wants_usage)


@pytest.mark.skipif("TOKENFLOW_FUZZ_CASE" not in os.environ, reason="no case is named")
def test_the_named_case() -> None:
    case(os.environ["TOKENFLOW_FUZZ_CASE"])


@given(seed=st.integers(0, 2**64 - 1))
def test_streams_of_any_seed(seed: int) -> None:
    """The same checks where hypothesis draws, and shrinks to the smallest seed that fails."""
    check_reader(drawn(seed))
    check_meter(drawn(seed))


# ---- answers ----------------------------------------------------------------------------------------------

ASKED_AT_ONCE = 10


async def ask(gateway: RunningGateway, engine: ReplayEngine, name: str) -> int:
    """One request that an engine answers wrongly: what comes of it, as a status."""
    odd = odd_answer(drawn(name))
    engine.scripts[name] = odd.script
    try:
        answer = await gateway.client.post(odd.path, json={"model": name, "stream": True, "messages": []})
        check_answer(odd, answer)
    except (AssertionError, ValueError, httpx.HTTPError) as error:
        raise AssertionError(f"{name}: {error!r}") from error
    finally:
        del engine.scripts[name]
    return answer.status_code


def check_answer(odd: OddAnswer, answer: httpx.Response) -> None:
    """A failure's status with its object, or a stream with its end: what the meter makes of the bytes."""
    assert answer.status_code not in FAULTS
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    if answer.status_code == 204:  # passed on, of an engine that says so
        assert not answer.content
        return
    if odd.path not in OPENAI:
        return
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.status_code == 200
        check_profile(answer.content, json_only=False)
    if odd.stream is not None:
        expected = before_error(client_bytes(odd.path, odd.stream, wants_usage=False))
        assert before_error(answer.content) == expected if expected else answer.status_code == 502


def before_error(body: bytes) -> bytes:
    """Without an error at the end, whose words differ."""
    return body.partition(b'data: {"error":')[0]


@pytest.mark.timeout(SECONDS + 120)
async def test_answers_at_random(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever an engine's connection brings, its client gets a failure's status or a stream with its end."""
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    scripts = scenarios.sglang("chat_stream")
    statuses: Counter[int] = Counter()
    async with (
        ReplayEngine(scripts) as engine,
        running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
    ):
        (served,) = gateway.app.registry
        end, count = time.monotonic() + SECONDS, 0
        while time.monotonic() < end:
            names = [f"answers:{SEED}:{count + number}" for number in range(ASKED_AT_ONCE)]
            for status in await asyncio.gather(*(ask(gateway, engine, name) for name in names)):
                statuses[status] += 1
            count += ASKED_AT_ONCE
            await eventually(lambda: served.healthy, "the probe sees that the engine is there")
        await gateway.everything_released()
        answer = await gateway.client.post(CHAT, json={"model": "chat_stream", "stream": True})
        assert check_profile(answer.content).error is None
    print(f"\nanswers: {count} requests in {SECONDS:g} s, seed {SEED}, {dict(statuses)}")  # noqa: T201
    assert not faults
    assert [record for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}] == []
    assert {200, 502} <= set(statuses)


# ---- requests ----------------------------------------------------------------------------------------------

ANSWERS = ("chat_stream", "chat_plain", "messages_stream", "error_temperature")
AT_ONCE = 40
QUIET_S = 0.15
"""A server that says nothing for so long waits for more of a request that will not come."""


class Answers:
    """What came back on one connection, held to the rules of HTTP."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self._parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    async def take(self, reader: asyncio.StreamReader) -> None:
        """All that comes until the connection ends or falls silent."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while data := await asyncio.wait_for(reader.read(1 << 16), QUIET_S):
                self._parser.feed_data(data)


async def send(port: int, name: str) -> list[int]:
    """One connection of a client that means no good: the statuses of the answers to it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = Answers()
    try:
        with contextlib.suppress(ConnectionError):
            for part in odd_connection(drawn(name), ANSWERS):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        await answers.take(reader)
    except httptools.HttpParserError as error:
        raise AssertionError(f"{name}: no HTTP came back: {error}") from error
    finally:
        writer.transport.abort()
    assert not FAULTS & set(answers.statuses), f"{name}: {answers.statuses}"
    return answers.statuses


@pytest.mark.timeout(SECONDS + 120)
async def test_requests_at_random(caplog: pytest.LogCaptureFixture) -> None:
    """The server answers or hangs up, logs no fault, releases everything, and serves the next one."""
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    scripts = scenarios.recordings(*ANSWERS, "models")
    scripts["/v1/models"] = scripts["models"]
    scripts["/v1/embeddings"] = scripts["chat_plain"]
    statuses: Counter[int] = Counter()
    async with (
        ReplayEngine(scripts) as engine,
        running_gateway({"url": engine.base_url, "link": "off"}, max_body_bytes=1 << 16) as gateway,
    ):
        port = int(gateway.base_url.rpartition(":")[2])
        end, count = time.monotonic() + SECONDS, 0
        while time.monotonic() < end:
            names = [f"requests:{SEED}:{count + number}" for number in range(AT_ONCE)]
            for answered in await asyncio.gather(*(send(port, name) for name in names)):
                statuses.update(answered or [0])
            count += AT_ONCE
        await gateway.everything_released()
        answer = await gateway.client.post(CHAT, json={"model": "chat_stream", "stream": True})
        check_profile(answer.content)
    print(f"\nrequests: {count} connections in {SECONDS:g} s, seed {SEED}, {dict(statuses)}")  # noqa: T201
    assert not faults
    assert [record for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}] == []
    assert {200, 400, 404} <= set(statuses)
