"""A gateway whose requests are ended wherever one likes, and the kinds of requests that are tried with it.

A request is ended at each single wait of its task: cancelled, as by a server whose grace is over, or left by
its client. `support.leftovers` says what is looked for after each.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.interruption import Interruptible, cancel
from support.leftovers import Leftovers, looking_for_leftovers
from support.plugin_stand_in import PluginStandIn
from support.replay_engine import Never, Pause, ReplayEngine, Script, Send, Step
from support.socket_client import SocketClient
from support.transcripts import Transcript, load
from support.wire import check_profile
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.tenants.admission_settings import AdmissionSettings

__all__ = [
    "CAP",
    "CHAT",
    "MOMENT_S",
    "MOST_WAITS",
    "QUEUEING",
    "SHAPES",
    "Shape",
    "Stage",
    "acting",
    "asked",
    "document",
    "event",
    "fails_visibly",
    "paused",
    "recorded",
    "staged",
    "told",
    "until_ended",
    "until_over",
]

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
MOMENT_S = 0.002
"""Between two parts of an answer, so that the gateway comes to wait for each."""
TIMED = "/v1/completions"
"""The route with short time-outs, where these are tried."""
SHORT_S = 0.1
CAP = 32 * 1024
SETTINGS = {"max_body_bytes": 1500, "usage": {"record": False}}
"""The record of usage is a file, opened when there is something to write: not by one request for itself."""
MOST_WAITS = 1000


@dataclass(kw_only=True)
class Shape:
    """A kind of request: what is asked, what the engine answers, what the client does meanwhile."""

    path: str = CHAT
    model: str
    script: Script
    request: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    stalls: bool = False
    """The client reads nothing until its share of memory is full."""
    uploads: bool = False
    """Its body comes some time after the head."""
    busy: bool = False
    """The engine that is asked first is busy; there is another one."""
    queued: bool = False
    """It waits before the engine, which has room as soon as it does."""
    step: int = 1
    """Each so many waits; more than 1 where they are all alike."""

    def body(self) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **self.request}
        return {**asked, "model": self.model}


def paused(parts: Iterable[bytes]) -> list[Step]:
    return [step for part in parts for step in (Pause(MOMENT_S), Send(part))]


def slowly(transcript: Transcript, *, most: int = 8) -> Script:
    """A recording with time between its parts, without the middle of a long one."""
    parts = [read.data for read in transcript.reads]
    parts = parts if len(parts) <= most else [*parts[: most - 4], *parts[-4:]]
    headers = {name: value for name, value in transcript.headers.items() if name != "transfer-encoding"}
    return Script(status=transcript.status, headers=headers, steps=paused(parts))


def recorded(name: str, **more: Any) -> Shape:
    transcript = load(name)
    return Shape(path=transcript.path, model=name, script=slowly(transcript), **more)


def unpooled() -> Script:
    """An answer after which the engine closes its connection, so that the next request makes one."""
    script = slowly(load("chat_stream"))
    return Script(headers={**script.headers, "connection": "close"}, steps=script.steps)


def event(text: str, *, size: int = 0) -> bytes:
    """One token, in as many bytes."""
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}' % text.encode() + b" " * size + b"\n\n"


def large() -> Script:
    """More than fits in between engine and client."""
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n' + DONE
    return Script(steps=[*(Send(event("word", size=4096)) for _ in range(300)), Send(end)])


def document(*parts: bytes, status: int = 200) -> Script:
    headers = {"content-type": "application/json", "content-length": str(sum(map(len, parts)))}
    return Script(status=status, headers=headers, steps=paused(parts))


def acting(script: Script, number: int, act: Callable[[], None]) -> Script:
    """The same answer, with something done before one of its steps."""

    def steps() -> Iterator[Step]:
        for at, step in enumerate(script.steps):
            if at == number:
                act()
            yield step

    return replace(script, steps=steps())


def beginning() -> list[Step]:
    return paused(read.data for read in load("completions_stream").reads[:4])


def timed(phase: str, script: Script, **settings: Any) -> Shape:
    """A request that takes longer than this phase may."""
    route = {TIMED: {"timeouts": {phase: SHORT_S}}}
    return Shape(path=TIMED, model=phase, script=script, settings={"routes": route, **settings})


ROOM, NO_ROOM = AdmissionSettings(engine_queue=1000), AdmissionSettings(engine_queue=1)
LIMITED = {"tenants": {"anonymous": {"limits": {"concurrent_streams": 1, "tokens_per_minute": 10_000_000}}}}
"""One request at a time, so that whatever keeps its share keeps out the next one."""
QUEUEING = {**LIMITED, "admission": {"enabled": True, "engine_queue": ROOM.engine_queue}}

SHAPES = {
    "stream": recorded("chat_stream"),
    "new connection": Shape(model="unpooled", script=unpooled()),
    "stream with usage": recorded("chat_stream_usage_continuous"),
    "paced": recorded(
        "chat_stream", headers={"x-tokenflow-delivery": "paced", "x-tokenflow-rate": "400"}, step=2
    ),
    "several answers": recorded("chat_stream_n2", request={"n": 2}),
    "document": recorded("chat_plain", request={"stream": False}),
    "passed through": Shape(
        path="/v1/embeddings", model="embeddings", script=document(b'{"data"', b":[]", b"}")
    ),
    "messages": recorded("messages_stream"),
    "responses": recorded("responses_stream"),
    "in the background": Shape(
        path="/v1/responses",
        model="background",
        request={"input": "hi", "stream": False, "background": True},
        script=document(b'{"id":"resp_1",', b'"status":"queued"}'),
        settings=LIMITED,
    ),
    "refused": recorded("error_temperature"),
    "refused, passed through": recorded("error_responses_off"),
    "truncated": Shape(
        model="truncated", script=scenarios.ends_without_done(load("chat_stream"), after_reads=4)
    ),
    "uploaded": recorded("chat_stream", uploads=True),
    "slow client": Shape(
        model="large", script=large(), stalls=True, settings={"delivery": {"max_buffered_bytes": CAP}}, step=7
    ),
    "silent engine": timed("first_byte_s", scenarios.never_answers()),
    "engine that begins": timed("first_byte_s", scenarios.never_begins()),
    "engine that stops": timed("idle_s", Script(steps=[*beginning(), Never()])),
    "engine without end": timed("total_s", Script(steps=[*beginning() * 100])),
    "kept alive": timed(
        "first_byte_s", scenarios.never_begins(), keep_alive={"form": "comment", "every_s": 0.05}
    ),
    "too large": recorded("chat_stream", uploads=True, request={"pad": "x" * 2000}),
    "busy, then another": Shape(model="busy", script=slowly(load("chat_stream")), busy=True),
    "limited": recorded("chat_stream", settings=LIMITED),
    "limited, passed through": Shape(
        path="/v1/embeddings", model="embeddings", script=document(b'{"data"', b":[]", b"}"), settings=LIMITED
    ),
    "queued": recorded("chat_stream", queued=True, settings=QUEUEING),
}

NEXT = Shape(model="next", script=scenarios.replay(load("chat_stream")))
"""What is asked to see that the gateway still answers: with no time between its parts."""


@dataclass
class Stage:
    """A gateway that can be interrupted, between clients on sockets and a replayed engine with its plugin."""

    gateway: RunningGateway
    interruptible: Interruptible
    engine: ReplayEngine
    plugin: PluginStandIn | None
    leftovers: Leftovers
    clients: list[SocketClient] = field(default_factory=list)

    async def client(self, shape: Shape) -> SocketClient:
        if shape.busy:
            self.engine.scripts[shape.model] = acting(document(b"{}", status=503), 0, self._is_free(shape))
        if shape.queued:
            self.has_room(yes=False)
        client = await SocketClient.ask(
            self.gateway.base_url,
            shape.path,
            shape.body(),
            headers=shape.headers,
            receive_buffer=4096 if shape.stalls else 0,
            send_body=not shape.uploads,
        )
        self.clients = [*(other for other in self.clients if not other.ended.is_set()), client]
        return client

    @property
    def waiting(self) -> int:
        """Requests before the engines."""
        return sum(self.gateway.app.fleet.admission.waiting.values())

    def has_room(self, *, yes: bool) -> None:
        """Whether the engine, in which others wait, takes one more."""
        admission = self.gateway.app.fleet.admission
        admission.update(ROOM if yes else NO_ROOM, floors={}, enabled=True)

    def close(self) -> None:
        """Whoever is still there leaves, so that a failed test does not wait for them."""
        for client in self.clients:
            client.reset()

    def _is_free(self, shape: Shape) -> Callable[[], None]:
        return lambda: self.engine.scripts.update({shape.model: shape.script})

    async def usable(self) -> None:
        """The next request is answered in full, from the pool or anew."""
        client = await self.client(NEXT)
        await until_ended(client)
        assert client.complete
        check_profile(bytes(client.body))


@asynccontextmanager
async def staged(shape: Shape, *, link: bool = True) -> AsyncIterator[Stage]:
    """Everything is running, linked, and has served one request."""
    scripts = {each.model: each.script for each in (*SHAPES.values(), NEXT, shape)}
    scripts["/v1/models"] = scenarios.recordings("models")["models"]
    scripts["/model_info"] = document(b"{}")
    scripts["/v1/responses/resp_1"] = document(b'{"id":"resp_1",', b'"status":"completed"}')
    wrapped: list[Interruptible] = []

    def around(app: Any) -> Interruptible:
        wrapped.append(Interruptible(app))
        return wrapped[0]

    async with ReplayEngine(scripts) as engine:
        entries = [{"url": engine.base_url, "id": "e", **({} if link else {"link": "off"})}]
        if shape.busy:
            entries.append({"url": engine.base_url, "id": "another", "link": "off"})
        plugin = PluginStandIn(engine.base_url).__enter__() if link else None
        try:
            async with running_gateway(*entries, around=around, **SETTINGS, **shape.settings) as gateway:
                state = next(iter(gateway.app.registry))
                await eventually(lambda: not link or state.stats is not None, "linked")
                if shape.queued:
                    await others_wait(plugin, state)
                async with looking_for_leftovers(gateway, engine, plugin) as leftovers:
                    stage = Stage(gateway, wrapped[0], engine, plugin, leftovers)
                    try:
                        await stage.usable()
                        await leftovers.none("one request")
                        yield stage
                    finally:
                        stage.close()
        finally:
            if plugin is not None:
                plugin.__exit__()


async def others_wait(plugin: PluginStandIn | None, engine: Engine) -> None:
    assert plugin is not None
    plugin.tells(waiting=2)
    await eventually(lambda: engine.stats is not None and engine.stats.waiting == 2, "told of those who wait")


async def until_ended(client: SocketClient) -> None:
    async with asyncio.timeout(5):
        await client.ended.wait()


async def until_over(stage: Stage, shape: Shape, client: SocketClient) -> None:
    """What the client does until the end of its connection."""
    if shape.uploads:
        await asyncio.sleep(MOMENT_S)
        client.send(json.dumps(shape.body()).encode())
    if shape.queued:
        await eventually(lambda: client.ended.is_set() or stage.waiting == 1, "it waits, or is over")
        stage.has_room(yes=True)
    if shape.stalls:
        client.stop_reading()
        streams = stage.gateway.streams
        await eventually(
            lambda: (
                client.ended.is_set() or any(s.held_bytes >= CAP or s.end for s in streams) or not streams
            ),
            "full, or over",
        )
        client.read_on()
    await until_ended(client)


def fails_visibly(client: SocketClient) -> bool:
    """Whether this answer cannot be taken for a whole one."""
    if not client.complete:
        return True
    if client.status != 200:
        return b'"error"' in client.body
    *_, last = client.body.removesuffix(DONE).removesuffix(b"\n\n").split(b"\n\n")
    return any(sign in last for sign in (b'"error":{', b"event: error", b"event: response.failed"))


async def asked(stage: Stage, shape: Shape, *numbers: int, ends: str) -> SocketClient:
    """One request, ended at its waits with these numbers, that has left nothing behind."""
    clients: list[SocketClient] = []
    acts: dict[str, Callable[[], None]] = {
        "cancelled": cancel,
        "reset": lambda: clients[0].reset(),
        "closed": lambda: clients[0].close(),
    }
    stage.interruptible.at(*numbers, act=acts[ends])
    client = await stage.client(shape)
    clients.append(client)
    await until_over(stage, shape, client)
    where = [stage.interruptible.waits[n - 1] for n in numbers if n <= len(stage.interruptible.waits)]
    await stage.leftovers.none(f"{ends} at waits {numbers}: {where}")
    return client


def told(engine: ReplayEngine) -> int:
    """Requests to abort that have come to the engine by its own route."""
    return sum(seen.path == "/abort_request" for seen in engine.requests)
