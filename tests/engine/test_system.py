"""The whole path on real parts: clients on sockets, `tokenflow serve`, SGLang with the plugin.

The model is the tiny one whose greedy text hardly repeats itself, so that a lost or doubled token shows.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.gateway import eventually
from support.gateway_process import GatewayProcess
from support.real_engine import RealEngine

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
LONG_PROMPT = "the licence of this program says " * 300
"""About 2,700 tokens, prefilled in pieces of 64."""


@dataclass
class Answer:
    """What a client received of one stream."""

    rid: str = ""
    text: str = ""
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    events: int = 0
    ended_at: float = 0.0
    finish_reasons: list[str] = field(default_factory=list)

    def take(self, line: bytes) -> None:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            self.done = True
        elif data:
            self._take_chunk(json.loads(data))

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        self.error = chunk.get("error", self.error)
        self.rid = chunk.get("id", self.rid)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            self.events += 1
            self.text += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                self.finish_reasons.append(choice["finish_reason"])


def asks(number: int, *, max_tokens: int, prompt: str = "") -> dict[str, Any]:
    return {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": f"request {number} {prompt}"}],
    }


class Clients:
    """Streaming clients of one gateway."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self._url = base_url + CHAT

    async def read(self, body: dict[str, Any], *, events: int | None = None) -> Answer:
        """Read to the end, or leave after so many events."""
        answer = Answer()
        async with self._session.post(self._url, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                answer.take(line)
                if events is not None and answer.events >= events:
                    response.close()
                    break
        answer.ended_at = time.monotonic()
        return answer

    @asynccontextmanager
    async def open(self, body: dict[str, Any]) -> AsyncIterator[tuple[aiohttp.ClientResponse, str]]:
        """A stream whose bytes are taken in the background, and the handle for reports on it."""
        async with self._session.post(self._url, json=body) as response:
            drain = asyncio.create_task(response.content.read())
            yield response, response.headers["X-TokenFlow-Stream"]
            drain.cancel()

    async def progress(self, rid: str, capability: str, report: dict[str, Any]) -> int:
        """Send one report; the status of the answer."""
        url = self._url.replace(CHAT, f"/v1/streams/{rid}/progress")
        body = {"capability": capability, "reports": [report]}
        async with self._session.post(url, json=body) as answer:
            return answer.status


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine's HTTP process records what it answered, by rid: SGLang's own request log."""
    return tmp_path_factory.mktemp("requests")


@pytest.fixture(scope="module")
def engine(new_engine: Callable[..., RealEngine], recorded: Path) -> Iterator[RealEngine]:
    log = ["--log-requests", "--log-requests-level", "3", "--log-requests-format", "json"]
    with new_engine(*log, "--log-requests-target", str(recorded)) as engine:
        yield engine


@pytest.fixture
def gateway(engine: RealEngine, tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(engine, tmp_path) as gateway:
        yield gateway


@pytest.fixture
async def clients(gateway: GatewayProcess) -> AsyncIterator[Clients]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await eventually(lambda: gateway.engine()["linked"], "linked")
        yield Clients(session, gateway.base_url)


def texts_of_the_engine(recorded: Path) -> dict[str, str]:
    """The text of every finished request, by rid, as the engine's own log has it."""
    lines = [line for path in recorded.iterdir() for line in path.read_text().splitlines()]
    records = [json.loads(line.partition("] ")[2]) for line in lines]
    return {r["rid"]: r["out"]["text"] for r in records if r["event"] == "request.finished"}


async def test_twenty_streams_arrive_as_the_engine_sent_them(
    gateway: GatewayProcess, clients: Clients, recorded: Path
) -> None:
    """Nothing lost, repeated or reordered, and the plugin's counts are the engine's."""
    answers = await asyncio.gather(*(clients.read(asks(n, max_tokens=100)) for n in range(20)))
    sent = texts_of_the_engine(recorded)
    assert len({answer.text for answer in answers}) == 20, "the texts differ, so that a mix-up would show"
    for answer in answers:
        assert answer.done
        assert answer.finish_reasons == ["length"]
        assert answer.text == sent[answer.rid]
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == 100
    await eventually(gateway.is_idle, "all is released")
    assert gateway.metric('tokenflow_generated_tokens_total{engine="e"}') == 2000
    assert gateway.metric('tokenflow_count_mismatches_total{engine="e"}') == 0


async def test_live_counts_rise_while_a_stream_runs(gateway: GatewayProcess, clients: Clients) -> None:
    reading = asyncio.create_task(clients.read(asks(1, max_tokens=300)))
    seen: list[int] = []

    def rises() -> bool:
        seen.extend(stream["generated"] for stream in gateway.streams() if stream["state"] == "running")
        return len(set(seen)) >= 3

    await eventually(rises, "three different counts")
    assert seen == sorted(seen)
    assert (await reading).done


async def test_both_sides_of_the_link_agree_on_a_readers_buffer(
    gateway: GatewayProcess, clients: Clients
) -> None:
    """A reader who has paused at token 20 of a running stream, as the gateway and the plugin see him."""
    async with clients.open(asks(1, max_tokens=1500)) as (answer, handle):
        rid, _, capability = handle.partition(".")
        await eventually(lambda: gateway.streams()[0]["delivered"] > 100, "well ahead of the reader")
        report = {"seq": 0, "tokens": 20, "paused": True}
        assert await clients.progress(rid, capability, report) == 200

        def agree() -> bool:
            (shown,) = gateway.streams()
            engines = shown["engine_buffered"]  # told now and then, with `generated`
            if shown["consumed"] != 20.0 or engines is None:
                return False
            return abs(shown["generated"] - engines - 20.0) <= 2.0

        await eventually(agree, "the engine has the pause")
        before = gateway.streams()[0]["engine_buffered"]
        await eventually(lambda: gateway.streams()[0]["engine_buffered"] > before + 50, "it fills")
        await eventually(agree, "still the same")
        answer.close()
    await eventually(gateway.is_idle, "released")


async def confirmed_within_a_second(gateway: GatewayProcess, left_at: float) -> None:
    await eventually(lambda: gateway.metric('tokenflow_aborts_total{outcome="confirmed"}') == 1, "confirmed")
    assert time.monotonic() - left_at < 1.0
    await eventually(gateway.is_idle, "the engine is idle", timeout_s=1.0)


async def test_a_client_that_leaves_after_three_tokens(gateway: GatewayProcess, clients: Clients) -> None:
    answer = await clients.read(asks(1, max_tokens=500), events=4)  # the first names the role
    await confirmed_within_a_second(gateway, answer.ended_at)


async def test_a_client_that_leaves_during_a_long_prefill(gateway: GatewayProcess, clients: Clients) -> None:
    request = asyncio.create_task(clients.read(asks(2, max_tokens=50, prompt=LONG_PROMPT)))
    await eventually(lambda: any(s["state"] == "running" for s in gateway.streams()), "it is being prefilled")
    (stream,) = gateway.streams()
    assert stream["generated"] == 0
    request.cancel()
    await confirmed_within_a_second(gateway, time.monotonic())


async def test_a_client_that_leaves_in_the_queue(gateway: GatewayProcess, clients: Clients) -> None:
    readers = [asyncio.create_task(clients.read(asks(n, max_tokens=300))) for n in range(24)]
    await eventually(lambda: (gateway.engine()["waiting"] or 0) > 0, "all places are taken")
    queued = asyncio.create_task(clients.read({**asks(99, max_tokens=10), "model": "queued"}))
    await eventually(
        lambda: any((s["model"], s["state"]) == ("queued", "waiting") for s in gateway.streams()), "it waits"
    )
    queued.cancel()
    left_at = time.monotonic()
    await eventually(lambda: gateway.metric('tokenflow_aborts_total{outcome="confirmed"}') == 1, "confirmed")
    assert time.monotonic() - left_at < 1.0
    answers = await asyncio.gather(*readers)
    assert all(answer.done and answer.error is None for answer in answers)


async def test_a_killed_gateway_leaves_nothing_running(gateway: GatewayProcess, clients: Clients) -> None:
    """SGLang itself aborts two seconds after a connection has closed."""
    readers = [asyncio.create_task(clients.read(asks(n, max_tokens=1500))) for n in range(4)]
    await eventually(lambda: gateway.engine()["running"] == 4, "four streams run")
    gateway.kill()
    ended = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(end, aiohttp.ClientError) for end in ended), "broken, not ended as if all were well"
    gateway.start()
    await eventually(gateway.is_idle, "the engine has dropped them", timeout_s=5.0)
    assert (await clients.read(asks(1, max_tokens=5))).done


async def test_a_gateway_that_comes_back_ends_what_its_death_left_in_prefill(
    gateway: GatewayProcess, clients: Clients
) -> None:
    """SGLang does not notice a lost client before the first token.

    The old process's silence says it, three seconds after its end, when a new one is there.
    """
    reading = asyncio.create_task(clients.read(asks(5, max_tokens=500, prompt=LONG_PROMPT)))
    await eventually(lambda: gateway.engine()["running"] == 1, "it is being prefilled")
    gateway.kill()
    assert isinstance((await asyncio.gather(reading, return_exceptions=True))[0], aiohttp.ClientError)
    gateway.start()
    await eventually(lambda: gateway.engine()["linked"], "linked")
    await eventually(gateway.is_idle, "dropped", timeout_s=5.0)


async def test_an_engine_that_is_killed_and_comes_back(
    new_engine: Callable[..., RealEngine], tmp_path: Path
) -> None:
    """Every client gets the error event within two seconds, and the gateway needs nobody's help."""
    with new_engine() as engine, GatewayProcess(engine, tmp_path) as gateway:
        anew = aiohttp.TCPConnector(limit=0, force_close=True)  # none is closed just as it is used again
        async with aiohttp.ClientSession(connector=anew) as session:
            clients = Clients(session, gateway.base_url)
            readers = [asyncio.create_task(clients.read(asks(n, max_tokens=1500))) for n in range(8)]
            await eventually(lambda: sum(s["delivered"] > 3 for s in gateway.streams()) == 8, "all stream")
            killed_at = time.monotonic()
            engine.kill()
            for answer in await asyncio.gather(*readers):
                assert answer.error is not None
                assert answer.error["code"] == "engine_connection_lost"
                assert answer.done
                assert answer.ended_at - killed_at < 2.0
            await eventually(lambda: not gateway.engine()["healthy"], "the gateway knows")
            async with session.post(gateway.base_url + CHAT, json=asks(1, max_tokens=5)) as refused:
                assert refused.status == 503
                assert refused.headers["retry-after"] == "2"
            engine.start()
            await eventually(lambda: gateway.engine()["linked"] and gateway.is_ready(), "found again")
            assert (await clients.read(asks(1, max_tokens=5))).done


async def test_with_the_plugin_off_everything_still_works(
    new_engine: Callable[..., RealEngine], tmp_path: Path
) -> None:
    with new_engine(env={"TOKENFLOW_PLUGIN": "off"}) as engine, GatewayProcess(engine, tmp_path) as gateway:
        async with aiohttp.ClientSession() as session:
            clients = Clients(session, gateway.base_url)
            answer = await clients.read(asks(1, max_tokens=20))
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == 20
            await clients.read(asks(2, max_tokens=2000), events=4)
            await eventually(lambda: not gateway.streams(), "released")
            reason = "no plugin answers"
            await eventually(lambda: reason in str(gateway.engine()["reason"]), "the reason is shown")
            shown = gateway.engine()
            assert (shown["healthy"], shown["linked"], shown["running"]) == (True, False, None)
            assert gateway.metric('tokenflow_engine_linked{engine="e"}') == 0
            assert gateway.metric('tokenflow_aborts_total{outcome="unlinked"}') == 1
