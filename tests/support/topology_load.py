"""Clients of a topology: a stream, several at once, a load that goes on; and what became of each stream."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from support.topology import READY_S, Part

__all__ = [
    "CHAT",
    "DONE",
    "Load",
    "SteadyLoad",
    "Stream",
    "engines_of",
    "gateways_of",
    "metric",
    "note",
    "until",
]

CHAT = "/v1/chat/completions"
DONE = "data: [DONE]"
_AGAIN_S = 0.05
"""Before a client that was refused asks again."""


@dataclass(eq=False)
class Stream:
    """One client's stream, read to its end."""

    name: str = "r"
    """Its request's id."""
    status: int = 0
    reason: str = ""
    """Why it was refused, in the gateway's word."""
    sent: float = 0.0
    """When it was asked for, by the monotonic clock."""
    at_s: list[float] = field(default_factory=list)
    """When each event came, after that."""
    ended: float | None = None
    text: str = ""
    broken: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.broken and "error" not in self.text and DONE in self.text

    @property
    def first_s(self) -> float:
        """Until its first event, or until it failed without one."""
        assert self.ended is not None or self.at_s
        return self.at_s[0] if self.at_s else (self.ended or 0.0) - self.sent

    def open_at(self, moment: float) -> bool:
        """Whether it was under way then."""
        return self.sent < moment and (self.ended is None or self.ended > moment)

    async def read(self, client: httpx.AsyncClient, *, tokens: int) -> Stream:
        body = {"model": "recorded", "stream": True, "max_tokens": tokens, "messages": []}
        self.sent = time.monotonic()
        try:
            async with client.stream("POST", CHAT, json=body, headers={"x-request-id": self.name}) as answer:
                self.status = answer.status_code
                self.reason = answer.headers.get("x-tokenflow-reason", "")
                async for line in answer.aiter_lines():
                    if line:
                        self.at_s.append(time.monotonic() - self.sent)
                        self.text += f"{line}\n"
                        self.begun.set()
        except httpx.TransportError:
            self.broken = True
        finally:
            self.ended = time.monotonic()
            self.begun.set()
        return self


@dataclass
class Load:
    """Streams that run at the same time, each known by the gateway and the engine that it is on."""

    streams: dict[str, Stream]
    tasks: list[asyncio.Task[Stream]]

    @classmethod
    async def of(cls, client: httpx.AsyncClient, count: int, *, tokens: int) -> Load:
        """Returns once all have begun, or were refused."""
        streams = {name: Stream(name) for name in (f"load-{number}" for number in range(count))}
        tasks = [asyncio.create_task(stream.read(client, tokens=tokens)) for stream in streams.values()]
        await asyncio.gather(*(stream.begun.wait() for stream in streams.values()))
        return cls(streams, tasks)

    async def on(self, gateway: Part, engine: Part | None = None) -> set[str]:
        """Those that a gateway has now, on one engine or any."""
        async with gateway.client() as client:
            listed = (await client.get("/admin/streams")).json()["streams"]
        return {
            stream["request_id"] for stream in listed if engine is None or stream["engine"] == engine.name
        }

    async def end(self) -> None:
        await asyncio.gather(*self.tasks)

    @property
    def whole(self) -> set[str]:
        return {name for name, stream in self.streams.items() if stream.whole}


class SteadyLoad:
    """Clients that ask for one stream after the other. Every stream is kept."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.streams: list[Stream] = []
        self._one_ended = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def of(cls, client: httpx.AsyncClient, lengths: Iterable[int]) -> AsyncIterator[SteadyLoad]:
        """A client for each length, in tokens, of its streams. Those under way at the end are read on."""
        load, over = cls(client), asyncio.Event()
        tasks = [
            asyncio.create_task(load._ask(number, tokens, over)) for number, tokens in enumerate(lengths)
        ]
        try:
            yield load
            over.set()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, number: int, tokens: int, over: asyncio.Event) -> None:
        count = 0
        while not over.is_set():
            stream = Stream(f"client-{number}-{count}")
            self.streams.append(stream)
            await stream.read(self._client, tokens=tokens)
            count += 1
            self._one_ended.set()
            if not stream.whole:
                await asyncio.sleep(_AGAIN_S)

    async def more(self, count: int, *, within_s: float = 60.0) -> list[Stream]:
        """Those that begin from now on and are read whole; returns when there are so many."""
        since = time.monotonic()
        async with asyncio.timeout(within_s):
            while len(whole := [stream for stream in self.since(since) if stream.whole]) < count:
                self._one_ended.clear()
                await self._one_ended.wait()
        return whole

    def since(self, moment: float) -> list[Stream]:
        """Those asked for from then on."""
        return [stream for stream in self.streams if stream.sent >= moment]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Of other processes, which tell nobody: so it is looked at, again and again."""
    async with asyncio.timeout(READY_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def metric(gateway: Part, name: str) -> float:
    """A sample as that gateway has it; `name` has its labels by their alphabet. 0: there is none."""
    async with gateway.client() as client:
        text = (await client.get("/metrics")).text
    assert f"# TYPE {name.partition('{')[0]} " in text, name
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def gateways_of(proxy: Part) -> dict[str, str]:
    """By the proxy's log: the address of the gateway that had a request, by its id; the last one asked."""
    lines = _json_lines((proxy.folder / "access.log").read_text().splitlines())
    return {line["request_id"]: line["upstream"].rpartition(", ")[2] for line in lines}


def engines_of(gateways: Iterable[Part]) -> dict[str, str]:
    """By the gateways' logs: the name of the engine that had a request, by its id; the last one asked."""
    ends = (
        line
        for gateway in gateways
        for line in _json_lines(gateway.log.read_text().splitlines())
        if line.get("event") == "stream ended"
    )
    return {line["request_id"]: line["engine"] for line in ends}


def _json_lines(lines: Iterable[str]) -> list[dict[str, str]]:
    """What else a program says on its standard error is no JSON."""
    return [json.loads(line) for line in lines if line.startswith("{")]


def note(line: str) -> None:
    """A line of figures for the docs: shown by ``pytest -s``, kept in the file TOKENFLOW_TOPOLOGY_RESULTS."""
    print(line)  # noqa: T201
    if path := os.environ.get("TOKENFLOW_TOPOLOGY_RESULTS"):
        with Path(path).open("a") as results:
            results.write(f"{line}\n")
