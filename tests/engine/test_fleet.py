"""The whole deployment with real engines: TLS proxy, two gateways, Redis, two SGLangs with the plugin.

The model is the tiny one whose greedy text hardly repeats itself, so that a lost or doubled token shows.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.keys import make_key
from support.real_engine import RealEngine
from support.topology import Part, Topology, needs_topology, topology
from support.topology_load import CHAT
from tokenflow_gateway.tenants.keys import NewKey

pytestmark = [*needs_topology, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

STREAMS, TOKENS, PACE = 16, 1000, 40.0
PAUSED_AT = 5
CLASSES = {"gold": {"weight": 8, "ttft_ms": 2000}, "bronze": {"weight": 1, "ttft_ms": 8000}}
TENANTS = {"gold": {"classes": ["gold"]}, "bronze": {"classes": ["bronze"]}}


@dataclass(eq=False)
class Reading:
    """One stream as its client has it."""

    key: NewKey
    number: int
    pace: float | None = None
    """Events a second that it takes from its socket; None: all there are."""
    handle: str = ""
    text: str = ""
    error: str | None = None
    done: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rid(self) -> str:
        return self.handle.partition(".")[0]

    async def read(self, client: httpx.AsyncClient) -> None:
        body = {
            "model": "tiny",
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": TOKENS,
            "messages": [{"role": "user", "content": f"request {self.number}"}],
        }
        headers = {"authorization": f"Bearer {self.key.text}"}
        try:
            async with client.stream("POST", CHAT, json=body, headers=headers, timeout=200) as answer:
                assert answer.status_code == 200, await answer.aread()
                self.handle = answer.headers["x-tokenflow-stream"]
                async for line in answer.aiter_lines():
                    if line.startswith(":"):
                        continue  # a ping: the engine has let others go first for a while
                    self._take(line.removeprefix("data: "))
                    if self.text and self.pace is not None:
                        await asyncio.sleep(1 / self.pace)  # as people read, not a condition
        finally:
            self.begun.set()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
        elif data:
            chunk = json.loads(data)
            self.error = (chunk.get("error") or {}).get("code", self.error)
            self.text += "".join(c["delta"].get("content") or "" for c in chunk.get("choices", ()))
            if self.text:
                self.begun.set()


class Operator:
    """Looks at all gateways with an administrator's key."""

    def __init__(self, running: Topology, key: NewKey) -> None:
        self._gateways = running.gateways
        self._headers = {"authorization": f"Bearer {key.text}"}

    async def _get(self, gateway: Part, what: str) -> list[dict[str, Any]]:
        async with gateway.client() as client:
            listed = (await client.get(f"/admin/{what}", headers=self._headers)).json()[what]
        return list(listed)

    async def engines(self) -> list[list[dict[str, Any]]]:
        """As each gateway has them."""
        return [await self._get(gateway, "engines") for gateway in self._gateways]

    async def streams(self) -> list[dict[str, dict[str, Any]]]:
        """As each gateway has its own, by their ids."""
        return [
            {stream["id"]: stream for stream in await self._get(gateway, "streams")}
            for gateway in self._gateways
        ]

    async def stream(self, rid: str) -> dict[str, Any]:
        found = [streams[rid] for streams in await self.streams() if rid in streams]
        assert found, "it has ended too soon"
        return found[0]

    async def forwarded(self, gateway: Part) -> float:
        """Reports that this gateway has handed to another."""
        async with gateway.client() as client:
            samples = (await client.get("/metrics", headers=self._headers)).text
        (value,) = re.findall(r"^tokenflow_progress_forwarded_total (\S+)$", samples, re.MULTILINE)
        return float(value)


async def until(condition: Callable[[], Any], what: str, *, within_s: float = 60.0) -> None:
    """Ask other processes again and again."""
    try:
        async with asyncio.timeout(within_s):
            while not await condition():  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not within {within_s} s: {what}")


def logging_to(folder: Path) -> list[str]:
    """SGLang's own record of what it answered."""
    log = ["--log-requests", "--log-requests-level", "3", "--log-requests-format", "json"]
    return [*log, "--log-requests-target", str(folder)]


def texts_in(folder: Path) -> dict[str, str]:
    """Of every request that this engine has finished, by rid."""
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines()]
    records = [json.loads(line.partition("] ")[2]) for line in lines]
    return {r["rid"]: r["out"]["text"] for r in records if r["event"] == "request.finished"}


@asynccontextmanager
async def two_engines(
    new_engine: Callable[..., RealEngine], folder: Path
) -> AsyncIterator[dict[str, RealEngine]]:
    engines = {name: new_engine(*logging_to(folder / name)) for name in ("one", "two")}
    async with AsyncExitStack() as stack:
        for name, engine in engines.items():
            (folder / name).mkdir()
            stack.callback(engine.stop)
        await asyncio.gather(*(asyncio.to_thread(engine.start) for engine in engines.values()))
        yield engines


async def test_one_engine_of_two_is_killed_under_load(
    new_engine: Callable[..., RealEngine], tmp_path: Path
) -> None:
    state = tmp_path / "state"  # where the topology's gateways look
    keys = [make_key(state, tenant) for tenant in TENANTS]
    admin = make_key(state, "operations", kind="admin")
    async with two_engines(new_engine, tmp_path) as engines:
        settings = {
            "engines": [
                {"url": engine.base_url, "id": name, "link": engine.link} for name, engine in engines.items()
            ],
            "link_secret": engines["one"].secret,
            "classes": CLASSES,
            "tenants": TENANTS,
        }
        async with topology(tmp_path, settings=settings) as running, running.proxy.client() as client:
            operator = Operator(running, admin)

            async def all_linked() -> bool:
                return all(engine["linked"] for shown in await operator.engines() for engine in shown)

            await until(all_linked, "both gateways have links to both engines")
            readings = [
                Reading(keys[number % 2], number, pace=PACE if number % 4 < 2 else None)
                for number in range(STREAMS)
            ]
            tasks = [asyncio.create_task(reading.read(client)) for reading in readings]
            await asyncio.gather(*(reading.begun.wait() for reading in readings))
            assert all(reading.text for reading in readings)
            on = await plugins_see_readers_of_both_gateways(operator)
            staying, unsaid = [r for r in readings if on[r.rid] == "two" and r.pace is None][:2]
            await a_report_through_the_wrong_gateway_reaches_the_plugin(operator, running, staying, unsaid)

            engines["one"].kill()
            after = Reading(keys[0], 100)
            await after.read(client)
            assert after.done, "the other engine serves who comes now"
            assert after.error is None
            await asyncio.gather(*tasks)

            async def all_released() -> bool:
                return not any(await operator.streams())

            await until(all_released, "all is released")
        texts = texts_in(tmp_path / "two")
    lost = {reading for reading in readings if on[reading.rid] == "one"}
    for reading in lost:
        assert reading.done, "it is told of its end"
        assert reading.error == "engine_connection_lost"
    assert len({reading.text for reading in readings}) == STREAMS, "so that a mix-up would show"
    for reading in {*readings, after} - lost:
        assert (reading.done, reading.error) == (True, None)
        assert reading.text == texts[reading.rid], "token for token what the engine has made"
    print(f"{len(lost)} of {STREAMS} streams were on the engine that was killed")  # noqa: T201


async def plugins_see_readers_of_both_gateways(operator: Operator) -> dict[str, str]:
    """Which stream is on which engine, by the way."""

    async def told() -> bool:
        """Each engine has told each gateway what it has of all, and of each stream what is unread."""
        streams, engines = await operator.streams(), await operator.engines()
        everybody = [stream for shown in streams for stream in shown.values()]
        if len(everybody) != STREAMS or any(stream["engine_buffered"] is None for stream in everybody):
            return False
        for engine in ("one", "two"):
            there = [[s for s in shown.values() if s["engine"] == engine] for shown in streams]
            assert all(there), "each gateway has streams on each engine"
            count = sum(map(len, there))
            for shown in engines:
                (figures,) = [entry for entry in shown if entry["id"] == engine]
                inside = figures["running"] + figures["parked"] + figures["waiting"] + figures["offloaded"]
                if inside != count:
                    return False
        return True

    await until(told, "the plugins know of all readers")
    return {rid: stream["engine"] for shown in await operator.streams() for rid, stream in shown.items()}


async def a_report_through_the_wrong_gateway_reaches_the_plugin(
    operator: Operator, running: Topology, reading: Reading, unsaid: Reading
) -> None:
    """A reader says at the other gateway that it has paused at PAUSED_AT, and later that it goes on.

    `unsaid` says nothing: the negative control, for whom the plugin must think that it has read more.
    """
    has_it = [reading.rid in streams for streams in await operator.streams()]
    assert sorted(has_it) == [False, True]
    wrong = running.gateways[has_it.index(False)]
    rid, _, capability = reading.handle.partition(".")

    async def report(seq: int, *, paused: bool) -> None:
        body = {"capability": capability, "reports": [{"seq": seq, "tokens": PAUSED_AT, "paused": paused}]}
        async with wrong.client() as client:
            answer = await client.post(f"/v1/streams/{rid}/progress", json=body)
        assert (answer.status_code, answer.json()["accepted"]) == (200, 1), answer.text

    async def read_there(of: Reading) -> float:
        """Tokens that the plugin thinks have been read of it."""
        stream = await operator.stream(of.rid)
        return float(stream["generated"] - stream["engine_buffered"])

    async def is_paused_there() -> bool:
        """At the average pace the plugin would think by now that 15 tokens more had been read."""
        return time.monotonic() - said > 4.0 and abs(await read_there(reading) - read) <= 5.0

    async def is_ahead() -> bool:
        return (await operator.stream(rid))["delivered"] > 50

    await until(is_ahead, "there is more than the reader says")
    before = await operator.forwarded(wrong)
    await report(0, paused=True)
    said, unsaid_read = time.monotonic(), await read_there(unsaid)
    read = (await operator.stream(rid))["consumed"]  # what had been taken for read by then stays so
    await until(is_paused_there, "the plugin has the pause")
    assert await read_there(unsaid) > unsaid_read + 10.0
    await report(1, paused=False)
    assert await operator.forwarded(wrong) == before + 2
