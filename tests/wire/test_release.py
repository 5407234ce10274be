"""Whatever ends a request, and wherever: nothing of it is left behind.

A request is ended at each single wait of its task: cancelled, as by a server whose grace is over, or left by
its client. Its engine's connection breaks at every kind of place in the answer. `support.leftovers` says what
is looked for after each.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from support import leftovers, scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.interruption import Interruptible, cancel
from support.leftovers import Leftovers, looking_for_leftovers, open_files
from support.plugin_stand_in import PluginStandIn
from support.replay_engine import (
    Close,
    Never,
    Pause,
    Raw,
    ReplayEngine,
    Reset,
    Script,
    SeenRequest,
    Send,
    Step,
)
from support.socket_client import SocketClient
from support.transcripts import Transcript, load
from support.wire import check_profile
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.lifecycle import Lifecycle
from tokenflow_gateway.link.client import EngineLink
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.guard import RequestGuard
from tokenflow_gateway.relay.stream import StreamTable
from tokenflow_gateway.relay.upstream import Upstream
from tokenflow_gateway.tenants.admission_settings import AdmissionSettings
from tokenflow_gateway.tenants.fair_queue import FairQueue
from tokenflow_gateway.tenants.limits import LocalLimits

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
        client = await self.client(SHAPES["stream"])
        await until_ended(client)
        assert client.complete
        check_profile(bytes(client.body))


@asynccontextmanager
async def staged(shape: Shape, *, link: bool = True) -> AsyncIterator[Stage]:
    """Everything is running, linked, and has served one request."""
    scripts = {each.model: each.script for each in SHAPES.values()} | {shape.model: shape.script}
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


# ---- at every wait --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        *((name, ends) for name in SHAPES for ends in ("cancelled", "reset")),
        *((name, "closed") for name in ("stream", "uploaded", "slow client", "queued")),
    ],
)
async def test_a_request_that_ends_at_any_wait_leaves_nothing(name: str, ends: str) -> None:
    shape = SHAPES[name]
    async with staged(shape) as stage:
        whole = await asked(stage, shape, ends=ends)
        for number in range(1, MOST_WAITS, shape.step):
            client = await asked(stage, shape, number, ends=ends)
            if not stage.interruptible.acted:
                break
            if ends == "cancelled":
                place = stage.interruptible.waits[number - 1]
                assert client.body == whole.body or fails_visibly(client), f"{place}: {client.body!r}"
            await stage.usable()
        else:
            pytest.fail("no end of waits")


@pytest.mark.parametrize("ends", ["cancelled", "reset"])
@pytest.mark.parametrize(
    "name",
    [
        "stream",
        "paced",
        "several answers",
        "passed through",
        "messages",
        "responses",
        "slow client",
        "limited",
        "in the background",
        "queued",
    ],
)
async def test_a_request_that_ends_between_any_parts_of_its_answer_leaves_nothing(
    name: str, ends: str
) -> None:
    """Both as the gateway waits for the next part and as the last one is on its way to it."""
    shape = SHAPES[name]
    async with staged(shape) as stage:
        clients: list[SocketClient] = []
        act = stage.interruptible.cancel if ends == "cancelled" else lambda: clients[-1].reset()
        for number in range(0, len(list(shape.script.steps)) + 1, shape.step):
            stage.interruptible.at()
            stage.engine.scripts[shape.model] = acting(shape.script, number, act)
            clients.append(await stage.client(shape))
            await until_over(stage, shape, clients[-1])
            await stage.leftovers.none(f"{ends} at step {number} of the answer")
            stage.engine.scripts[shape.model] = shape.script
            await stage.usable()
        assert clients[-1].complete, "the last one was left alone"


@pytest.mark.parametrize("name", ["stream", "paced", "messages", "document", "slow client", "queued"])
async def test_a_request_cancelled_twice_leaves_nothing(name: str) -> None:
    """The server cancels what outlasts its grace, and the end of the event loop what still runs then."""
    shape = SHAPES[name]
    async with staged(shape) as stage:
        for number in range(1, MOST_WAITS, 3 * shape.step):
            await asked(stage, shape, number, number + 1, ends="cancelled")
            if not stage.interruptible.acted:
                break


async def test_an_unlinked_engine_is_told_of_every_end() -> None:
    """By SGLang's own route, once for each request that was ended, and for no other."""
    shape = SHAPES["stream"]
    async with staged(shape, link=False) as stage:
        for number in range(1, MOST_WAITS):
            before = told(stage.engine)
            client = await asked(stage, shape, number, ends="cancelled")
            assert told(stage.engine) - before == int(fails_visibly(client))
            if not stage.interruptible.acted:
                break


# ---- wherever the engine's connection ends ----------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """An answer as it is on the engine's connection, and where it can end."""

    head: bytes
    parts: tuple[bytes, ...]
    """With their framing, the last of a chunked answer included."""

    @classmethod
    def chunked(cls, *parts: bytes) -> Wire:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        return cls(head, (*(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"))

    @classmethod
    def sized(cls, *parts: bytes) -> Wire:
        size = sum(map(len, parts))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % size
        return cls(head, parts)

    def places(self) -> dict[str, int]:
        """One of each kind of place, by its offset."""
        data = self.head + b"".join(self.parts)
        first, last = len(self.head), len(data) - len(self.parts[-1])
        places = {
            "before the head": 0,
            "in the status line": 5,
            "behind a line of the head": data.index(b"\r\n") + 2,
            "in a header": data.index(b"content-type") + 4,
            "before the end of the head": first - 2,
            "behind the head": first,
            "in the first part": first + len(self.parts[0]) // 2,
            "behind the first part": first + len(self.parts[0]),
            "before the last part": last,
            "in the last part": len(data) - 2,
            "behind all of it": len(data),
        }
        if b"chunked" in self.head:
            places |= {
                "in a chunk's size": first + 1,
                "behind a chunk's size": data.index(b"\r\n", first) + 2,
                "between the ends of an event": data.index(b"\n\n", first) + 1,
                "behind an event, before its chunk's end": data.index(b"\n\n", first) + 2,
                "before the last event": data.rindex(b"data: "),
                "in the last event": data.rindex(b"data: ") + 8,
                "behind the last event": data.rindex(b"\n\n") + 2,
            }
        if any(byte >= 0xC0 for byte in data):
            places["in a character"] = next(at for at, byte in enumerate(data) if byte >= 0xC0) + 1
        return places

    def until(self, at: int, end: Step) -> Script:
        data = self.head + b"".join(self.parts)
        return Script(steps=[*([Raw(data[:at])] if at else []), end])


WIRES = {
    name: Wire.chunked(*(read.data for read in load(name).reads))
    for name in ("chat_stream_emoji", "chat_stream_usage_continuous", "messages_stream", "responses_stream")
} | {"chat_plain": Wire.sized(load("chat_plain").data)}


@pytest.mark.parametrize("end", [Close(), Reset()], ids=["closed", "reset"])
@pytest.mark.parametrize("name", WIRES)
async def test_an_engine_lost_at_any_kind_of_place_leaves_nothing(name: str, end: Step) -> None:
    wire = WIRES[name]
    shape = recorded(name, request=load(name).request_json())
    shape = replace(shape, script=scenarios.replay(load(name)))
    async with staged(shape) as stage:
        whole = await asked(stage, shape, ends="cancelled")
        assert (whole.status, whole.complete) == (200, True)
        for place, at in wire.places().items():
            stage.engine.scripts[shape.model] = wire.until(at, end)
            client = await asked(stage, shape, ends="cancelled")
            await stage.leftovers.none(f"an engine lost {place}")
            assert client.body == whole.body or fails_visibly(client), f"{place}: {client.body!r}"
            if place in {"before the head", "behind the head", "before the last event"}:
                assert client.body != whole.body
            await eventually(lambda: all(e.healthy for e in stage.gateway.app.registry), "the engine is back")
            await stage.usable()


# ---- the numbered cases ---------------------------------------------------------------------------------


async def engines_request(stage: Stage, path: str = CHAT, *, before: int) -> SeenRequest:
    """The newest request for `path` at the engine, once there are more than `before`."""
    posts: list[SeenRequest] = []

    def here() -> bool:
        posts[:] = [seen for seen in stage.engine.requests if seen.path == path]
        return len(posts) > before

    await eventually(here, "the engine has the request")
    return posts[-1]


def posts(stage: Stage) -> int:
    return sum(seen.path == CHAT for seen in stage.engine.requests)


ENDLESS = Shape(model="endless", script=scenarios.endless(load("chat_stream")))


@pytest.mark.parametrize(
    "shape", [ENDLESS, SHAPES["silent engine"]], ids=["after three chunks", "in prefill"]
)
async def test_case_15_a_client_that_resets_stops_the_engine_within_a_second(shape: Shape) -> None:
    async with staged(replace(shape, settings={})) as stage:
        assert stage.plugin is not None
        ends = stage.plugin.closed
        client = await stage.client(shape)
        seen = await engines_request(stage, shape.path, before=1 if shape is ENDLESS else 0)
        if shape is ENDLESS:
            await eventually(lambda: client.body.count(b"\n\n") >= 3, "three chunks")
        client.reset()
        async with asyncio.timeout(1):
            await seen.disconnected.wait()
        await eventually(lambda: list(ends.values())[-1] == "client_gone", "the plugin knows", timeout_s=1)
        await stage.leftovers.none("a reset")


async def test_case_17_clients_that_leave_before_their_body_and_refused_streams_exhaust_nothing() -> None:
    busy = b'{"object":"error","message":"too many requests","type":"RateLimitError","code":429}'
    refused = Shape(model="busy", script=document(busy, status=429))
    async with staged(refused) as stage:
        for _ in range(150):
            client = await SocketClient.ask(stage.gateway.base_url, CHAT, refused.body(), send_body=False)
            client.reset()
        await stage.leftovers.none("clients that left before their body")
        assert posts(stage) == 1, "the engine never heard of them"
        for _ in range(150):
            client = await stage.client(refused)
            await until_ended(client)
            assert client.status == 429
        await stage.leftovers.none("refused streams")
        await stage.usable()


async def test_case_18_a_stream_that_is_aborted_makes_room_for_the_next() -> None:
    """A gateway with one place: it is free again as soon as the stream's client has left."""
    async with staged(replace(ENDLESS, settings={"max_connections": 1})) as stage:
        for number in range(20):
            client = await stage.client(ENDLESS)
            seen = await engines_request(stage, before=number + 1)
            await client.got_text.wait()
            if number == 0:
                refused = await stage.client(SHAPES["stream"])
                await until_ended(refused)
                assert refused.status != 200, "there is one place only"
            client.reset()
            await seen.disconnected.wait()
            await stage.leftovers.none("an aborted stream")


@pytest.mark.parametrize("later", [0, 3])
async def test_case_19_the_tokens_of_an_aborted_stream_are_accounted(later: int) -> None:
    """Ten of them have come, and the engine generates `later` more before it hears of the end."""
    ten = [event("word") for _ in range(10)]
    shape = Shape(model="ten", script=Script(steps=[*paused(ten), Never()]))
    async with staged(shape) as stage:
        assert stage.plugin is not None
        stage.plugin.generated = 10 + later
        before = stage.gateway.metric("tokenflow_generated_tokens_total", engine="e")
        client = await stage.client(shape)
        await eventually(lambda: client.body.count(b"word") == 10, "ten tokens")
        client.reset()
        await stage.leftovers.none("an aborted stream")
        generated = stage.gateway.metric("tokenflow_generated_tokens_total", engine="e") - before
        assert generated == 10 + later
        ended = stage.gateway.metric(
            "tokenflow_streams_ended_total", engine="e", route=CHAT, reason="client_gone"
        )
        assert ended == 1


@pytest.mark.parametrize("at_cap", ["hold", "abort"])
async def test_case_26_a_client_that_stops_reading_is_bounded_in_bytes(at_cap: str) -> None:
    """Held: the engine stops being read, until the client has left. Aborted: the engine is free at once."""
    delivery = {"max_buffered_bytes": CAP, "at_cap": at_cap}
    shape = replace(ENDLESS, stalls=True, settings={"delivery": delivery})
    async with staged(shape) as stage:
        client = await stage.client(shape)
        client.stop_reading()
        seen = await engines_request(stage, before=1)
        if at_cap == "hold":
            await eventually(lambda: stage.gateway.streams[0].held_bytes >= CAP, "full")
            sent, still = -1, 0
            while still < 20:
                await asyncio.sleep(MOMENT_S)
                still = still + 1 if seen.sent_bytes == sent else 0
                sent = seen.sent_bytes
                assert stage.gateway.streams[0].held_bytes < 2 * CAP
            client.reset()
        else:
            await seen.disconnected.wait()
            client.read_on()
            await until_ended(client)
            assert fails_visibly(client)
        await stage.leftovers.none(at_cap)
        reason = "client_gone" if at_cap == "hold" else "client_too_slow"
        assert (
            stage.gateway.metric("tokenflow_streams_ended_total", engine="e", route=CHAT, reason=reason) == 1
        )


# ---- the gateway's own end ------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [True, False])
async def test_a_gateway_that_goes_takes_everything_with_it(*, link: bool) -> None:
    """With a request of each kind under way, cancelled by the server at the end of a grace of no length."""
    files, tasks = open_files(), asyncio.all_tasks()
    async with staged(replace(ENDLESS, settings={"shutdown_grace_s": 0}), link=link) as stage:
        others = [shape for shape in SHAPES.values() if not (shape.uploads or shape.queued)]
        clients = [await stage.client(shape) for shape in others]
        clients += [await stage.client(ENDLESS) for _ in range(5)]
        await clients[-1].got_text.wait()
        stage.gateway.server.should_exit = True
        for client in clients:
            await until_ended(client)
        for client in clients[-5:]:
            assert client.complete
            assert b"gateway_shutdown" in client.body
            check_profile(bytes(client.body))
        engine, plugin = stage.engine, stage.plugin
    assert all(seen.done.is_set() for seen in engine.requests)
    if plugin is None:
        assert told(engine) >= 5, "the endless ones were to be aborted"
    else:
        assert not plugin.open
    await eventually(lambda: not asyncio.all_tasks() - tasks, "no task is left")
    await eventually(lambda: open_files() == files, "no descriptor is left")


async def test_a_gateway_that_goes_tells_those_who_wait() -> None:
    shape = replace(SHAPES["queued"], settings={**QUEUEING, "shutdown_grace_s": 0})
    async with staged(shape) as stage:
        client = await stage.client(shape)
        await eventually(lambda: stage.waiting == 1, "it waits")
        asked = len(stage.engine.requests)
        stage.gateway.server.should_exit = True
        await until_ended(client)
        assert client.status == 503
        assert b"gateway_shutdown" in client.body
        assert not [seen for seen in stage.engine.requests[asked:] if seen.method == "POST"]
        assert not list(stage.leftovers.of_entry())


# ---- the control: each of these would be found ------------------------------------------------------------


def keeps_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamTable, "remove", lambda self, rid: self.get(rid))


def keeps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamTable, "remove", lambda self, rid: self._streams.pop(rid, None))


def keeps_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Delivery, *_exc: object) -> None:
        pass

    monkeypatch.setattr(Delivery, "__aexit__", nothing)


def keeps_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: RequestGuard, *_exc: object) -> None:
        pass

    monkeypatch.setattr(RequestGuard, "__aexit__", nothing)


def keeps_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Upstream.request
    kept = []

    @asynccontextmanager
    async def request(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        kept.append(whole(*args, **kwargs))
        yield await kept[-1].__aenter__()

    monkeypatch.setattr(Upstream, "request", request)


def keeps_the_engine_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineLink, "closed", lambda _self, _rid, _reason: True)


def raises_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Lifecycle.close

    async def fail() -> None:
        raise ZeroDivisionError

    def close(self: Lifecycle, *args: Any) -> None:
        asyncio.get_running_loop().create_task(fail())
        whole(self, *args)

    monkeypatch.setattr(Lifecycle, "close", close)


def keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairQueue, "remove", lambda _self, _waiting: None)


def keeps_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLimits, "settle", lambda _self, _lease, _tokens: None)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (keeps_records, "stream"),
        (keeps_counts, "stream"),
        (keeps_text, "paced"),
        (keeps_watching, "stream"),
        (keeps_connections, "slow client"),
        (keeps_the_engine_waiting, "stream"),
        (raises_unheard, "stream"),
        (keeps_its_place, "queued"),
        (keeps_its_share, "limited"),
        (keeps_its_share, "limited, passed through"),
    ],
)
async def test_a_release_that_is_left_out_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    shape = replace(shape, headers={**shape.headers, "x-tokenflow-rate": "2"})
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.3)
    with pytest.raises(AssertionError, match="after reset at waits"):
        async with staged(shape) as stage:
            fault(monkeypatch)
            for number in range(1, MOST_WAITS, shape.step):
                await asked(stage, shape, number, ends="reset")
                gc.collect()
                if not stage.interruptible.acted:
                    break
