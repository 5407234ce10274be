"""`tokenflow serve --workers 2`: several processes on one port are one gateway to everybody outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from support import scenarios
from support.gateway import eventually
from support.plugin_stand_in import STATS, WELCOME
from support.replay_engine import ReplayEngine
from support.served import PATIENCE_S, Served, serving
from support.socket_client import SocketClient
from support.transcripts import load
from tokenflow_engine.control.endpoint import default_endpoint, link_secret
from tokenflow_engine.control.server import LinkServer
from tokenflow_engine.protocol import SetPolicy
from tokenflow_gateway.app import Gateway
from tokenflow_gateway.config import ANONYMOUS, load_settings
from tokenflow_gateway.readers.learned import LearnedRates
from tokenflow_gateway.readers.track import ReaderTrack, Watched
from tokenflow_gateway.workers.worker import Worker

CHAT = "/v1/chat/completions"
FINISHED = f'tokenflow_streams_ended_total{{engine="e",reason="finished",route="{CHAT}"}}'
STREAM = load("chat_stream")
CLIENTS = 24


class Workers:
    """A gateway of two workers, asked on a new connection each time, so that each of them gets questions."""

    def __init__(self, served: Served, visitor: httpx.AsyncClient) -> None:
        self.served = served
        self._visitor = visitor
        self.clients: list[SocketClient] = []

    async def get(self, path: str) -> httpx.Response:
        return await self._visitor.get(path)

    async def post(self, path: str, body: object) -> httpx.Response:
        return await self._visitor.post(path, json=body)

    async def ask(self, connected: socket.socket, path: str, body: object) -> SocketClient:
        """On a connection that `self.connected` has made."""
        client = await SocketClient.ask(self.served.base_url, path, body, connected=connected)
        self.clients.append(client)
        return client

    async def streams(self) -> dict[str, Any]:
        shown = (await self.get("/admin/streams")).json()
        assert isinstance(shown, dict)
        return shown

    async def metric(self, sample: str) -> float:
        """The value of one sample as Prometheus names it, labels included; 0 where there is none."""
        for line in (await self.get("/metrics")).text.splitlines():
            if line.startswith(f"{sample} "):
                return float(line.rpartition(" ")[2])
        return 0.0

    async def connected(self, index: int, count: int = 1) -> list[socket.socket]:
        """Connections that this worker has accepted: left to themselves, it may be the same one each time."""
        others = [pid for other, pid in self.pids().items() if other != index]
        try:
            for pid in others:
                os.kill(pid, signal.SIGSTOP)
                await eventually(lambda pid=pid: _state(pid) == "T", "the other worker stands still")
            return [await self._answered() for _ in range(count)]
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)

    async def _answered(self) -> socket.socket:
        loop, sock = asyncio.get_running_loop(), socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", self.served.port))
        await loop.sock_sendall(sock, b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b""
        async with asyncio.timeout(PATIENCE_S):
            while not answer.endswith(b"}"):
                received = await loop.sock_recv(sock, 4096)
                assert received, answer
                answer += received
        assert answer.startswith(b"HTTP/1.1 200"), answer
        return sock

    def pids(self) -> dict[int, int]:
        """The latest process of each worker, by the log."""
        lines = [json.loads(line) for line in self.served.log.read_text().splitlines() if line[:1] == "{"]
        return {line["index"]: line["pid"] for line in lines if line["event"] == "worker started"}

    async def until(self, path: str, status: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if (await self.get(path)).status_code == status:
                    return
                await asyncio.sleep(0.02)

    async def until_metric(self, sample: str, value: float) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await self.metric(sample) == value:
                    return
                await asyncio.sleep(0.02)


@pytest.fixture
async def gate() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def engine(gate: asyncio.Event) -> AsyncIterator[ReplayEngine]:
    """Its model `held` ends its streams once the gate is open."""
    scripts = scenarios.recordings("models", "chat_stream")
    scripts["/v1/models"] = scripts["models"]
    scripts["held"] = scenarios.replay(STREAM, gates={len(STREAM.reads) - 1: gate})
    async with ReplayEngine(scripts) as engine:
        yield engine


@contextlib.asynccontextmanager
async def two_workers(
    engine: ReplayEngine, tmp_path: Path, *, link: str = "off", **settings: object
) -> AsyncIterator[Workers]:
    async with (
        serving(engine, tmp_path, workers=2, link=link, **settings) as served,
        httpx.AsyncClient(base_url=served.base_url, trust_env=False, limits=_NONE_KEPT) as visitor,
    ):
        workers = Workers(served, visitor)
        yield workers
        for client in workers.clients:
            client.close()


_NONE_KEPT = httpx.Limits(max_keepalive_connections=0)


@pytest.fixture
async def workers(engine: ReplayEngine, tmp_path: Path) -> AsyncIterator[Workers]:
    async with two_workers(engine, tmp_path) as workers:
        yield workers


def asks(model: str) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]}


async def under_way(workers: Workers, count: int = CLIENTS) -> list[SocketClient]:
    """Half of them on each worker; a single one on the first."""
    halves = await workers.connected(0, count - count // 2), await workers.connected(1, count // 2)
    clients = [await workers.ask(connected, CHAT, asks("held")) for half in halves for connected in half]
    async with asyncio.timeout(PATIENCE_S):
        for client in clients:
            await client.got_text.wait()
    return clients


async def all_ended(clients: list[SocketClient]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for client in clients:
            await client.ended.wait()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_reports_count_whichever_worker_they_come_to(workers: Workers) -> None:
    (client,) = await under_way(workers, 1)
    rid, _, capability = client.headers["x-tokenflow-stream"].partition(".")
    path = f"/v1/streams/{rid}/progress"
    for index in (0, 1):
        body = {"capability": capability, "reports": [{"seq": 1 + index, "tokens": 1.0 + index / 100}]}
        (connected,) = await workers.connected(index)
        report = await workers.ask(connected, path, body)
        await all_ended([report])
        assert (report.status, json.loads(report.body)["accepted"]) == (200, 1), report.body
        assert report.headers["access-control-allow-origin"] == "*"
        assert await workers.metric("tokenflow_progress_forwarded_total") == index
    for _ in range(6):
        assert await workers.metric('tokenflow_progress_requests_total{outcome="accepted"}') == 2
        (shown,) = (await workers.streams())["streams"]
        assert shown["source"] == "progress"
    strange = {"capability": "A" * 22, "reports": [{"seq": 99, "tokens": 1.0}]}
    refused = [(await workers.post(path, strange)).status_code for _ in range(6)]
    assert refused == [403] * 6


async def test_views_and_metrics_are_of_all_workers(workers: Workers, gate: asyncio.Event) -> None:
    clients = await under_way(workers)
    for _ in range(6):
        shown = await workers.streams()
        assert (shown["total"], len(shown["streams"])) == (CLIENTS, CLIENTS)
        assert {stream["worker"] for stream in shown["streams"]} == {0, 1}
        ages = [stream["age_s"] for stream in shown["streams"]]
        assert ages == sorted(ages, reverse=True)
        (engine,) = (await workers.get("/admin/engines")).json()["engines"]
        assert (engine["id"], engine["healthy"], engine["streams"]) == ("e", True, CLIENTS)
        assert await workers.metric('tokenflow_engine_streams{engine="e"}') == CLIENTS
        assert await workers.metric('tokenflow_engine_healthy{engine="e"}') == 1
    gate.set()
    await all_ended(clients)
    for _ in range(6):
        assert await workers.metric(FINISHED) == CLIENTS
        first = 'tokenflow_time_to_first_token_seconds_bucket{engine="e",le="+Inf"}'
        assert await workers.metric(first) == CLIENTS


async def test_kill_takes_one_workers_streams_alone(workers: Workers, gate: asyncio.Event) -> None:
    """Nobody else notices, what was counted stays counted, and the worker comes back."""
    for _ in range(8):
        await workers.post(CHAT, asks("chat_stream"))
    assert await workers.metric(FINISHED) == 8
    clients = await under_way(workers)
    owners = {view["id"]: view["worker"] for view in (await workers.streams())["streams"]}
    before = workers.pids()
    os.kill(before[0], signal.SIGKILL)
    of_the_dead = [client for client in clients if owners[_rid(client)] == 0]
    others = [client for client in clients if owners[_rid(client)] == 1]
    await all_ended(of_the_dead)
    await workers.until("/health/ready", 503)
    assert await workers.metric(FINISHED) == 8
    gate.set()
    await all_ended(others)
    assert [bytes(client.body) for client in others] == [STREAM.data] * len(others)
    assert not any(client.complete for client in of_the_dead)
    await workers.until("/health/ready", 200)
    after = workers.pids()
    assert after[0] != before[0]
    assert after[1] == before[1]
    for _ in range(6):
        assert await workers.metric(FINISHED) == 8 + len(others)
    answers = [(await workers.post(CHAT, asks("chat_stream"))).content for _ in range(6)]
    assert answers == [STREAM.data] * 6


async def test_a_worker_that_ends_in_order_leaves_all_its_counts(workers: Workers) -> None:
    """Also those that nobody has asked for yet."""
    for _ in range(CLIENTS):
        await workers.post(CHAT, asks("chat_stream"))
    before = workers.pids()
    os.kill(before[0], signal.SIGTERM)
    await eventually(lambda: workers.pids()[0] != before[0], "it is started again")
    assert await workers.metric(FINISHED) == CLIENTS
    await workers.until("/health/ready", 200)
    assert [await workers.metric(FINISHED) for _ in range(6)] == [CLIENTS] * 6


async def test_open_streams_count_although_the_worker_that_counts_has_died(
    engine: ReplayEngine, gate: asyncio.Event, tmp_path: Path
) -> None:
    limits = {"anonymous": {"limits": {"concurrent_streams": CLIENTS}}}
    async with two_workers(engine, tmp_path, tenants=limits) as workers:
        clients = await under_way(workers)
        owners = {view["id"]: view["worker"] for view in (await workers.streams())["streams"]}
        left = sum(owners[_rid(client)] == 1 for client in clients)
        assert left == CLIENTS // 2
        before = workers.pids()[0]
        os.kill(before, signal.SIGKILL)
        await eventually(lambda: workers.pids()[0] != before, "it is started again")
        await workers.until("/health/ready", 200)
        await under_way(workers, CLIENTS - left)
        refused = [await workers.post(CHAT, asks("held")) for _ in range(6)]
        assert [answer.headers.get("x-tokenflow-reason") for answer in refused] == ["streams"] * 6
        gate.set()
        await all_ended(workers.clients)
        async with asyncio.timeout(PATIENCE_S):
            while (await workers.post(CHAT, asks("chat_stream"))).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_reports_of_a_dead_workers_streams_are_told_so(workers: Workers) -> None:
    clients = await under_way(workers)
    owners = {view["id"]: view["worker"] for view in (await workers.streams())["streams"]}
    dead = next(client for client in clients if owners[_rid(client)] == 0)
    os.kill(workers.pids()[0], signal.SIGKILL)
    await all_ended([dead])
    rid, _, capability = dead.headers["x-tokenflow-stream"].partition(".")
    body = {"capability": capability, "reports": [{"seq": 1, "tokens": 1.0}]}
    answer = await workers.post(f"/v1/streams/{rid}/progress", body)
    assert answer.status_code == 404


async def test_sigterm_under_load_lets_all_workers_streams_finish(
    workers: Workers, gate: asyncio.Event
) -> None:
    clients = await under_way(workers)
    pids = workers.pids().values()
    workers.served.signal()
    await workers.until("/health/ready", 503)
    refused = [await workers.post(CHAT, asks("held")) for _ in range(6)]
    assert {answer.status_code for answer in refused} == {503}
    assert {answer.json()["error"]["code"] for answer in refused} == {"gateway_shutdown"}
    assert (await workers.streams())["total"] == CLIENTS
    gate.set()
    await all_ended(clients)
    assert [bytes(client.body) for client in clients] == [STREAM.data] * CLIENTS
    await workers.served.gone()
    assert workers.served.process.returncode == 0
    assert not any(is_alive(pid) for pid in pids)


async def test_sigterm_twice_ends_the_grace_of_all_workers(workers: Workers) -> None:
    clients = await under_way(workers)
    workers.served.signal()
    await workers.until("/health/ready", 503)
    workers.served.signal()
    await all_ended(clients)
    assert all(client.complete for client in clients)
    assert all(b"gateway_shutdown" in client.body for client in clients)
    await workers.served.gone()


async def test_workers_do_not_outlive_the_process_that_started_them(workers: Workers) -> None:
    pids = workers.pids().values()
    assert all(is_alive(pid) for pid in pids)
    workers.served.process.kill()
    await workers.served.process.wait()
    await eventually(lambda: not any(is_alive(pid) for pid in pids), "the workers have ended")


async def test_each_worker_links_and_a_policy_is_set_once(engine: ReplayEngine, tmp_path: Path) -> None:
    endpoint = default_endpoint(int(engine.base_url.rpartition(":")[2]))
    server = LinkServer(endpoint, secret=link_secret(), welcome=_WELCOME, stats=STATS)
    server.start()
    try:
        async with two_workers(engine, tmp_path, link=endpoint) as workers:
            await workers.until_metric('tokenflow_engine_kv_tokens{engine="e"}', 1000)
            await workers.until_metric('tokenflow_engine_linked{engine="e"}', 1)
            assert (await workers.post("/admin/engines/e/policy", {"policy": "fcfs"})).status_code == 202
            await under_way(workers)
            heard = [delivery for _ in range(100) for delivery in server.receive(limit=1000)]
            opened = [each for each in heard if not isinstance(each.message, SetPolicy)]
            assert len(heard) - len(opened) == 1
            assert len({each.owner.gateway_id for each in opened}) == 2
    finally:
        server.close()


async def test_what_one_worker_learns_of_a_reader_the_others_know(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    settings = load_settings(overrides={"engines": [{"url": engine.base_url, "link": "off"}]})
    crew = Worker.crew(3, tmp_path)
    gateways = [Gateway(settings, worker=worker) for worker in crew]
    async with contextlib.AsyncExitStack() as stack:
        for gateway in gateways:
            await stack.enter_async_context(gateway.running())
        for worker in crew:
            await eventually(worker.socket(worker.index).is_socket, "a worker listens")

        def source(gateway: Gateway, user: str) -> str:
            now = time.monotonic()
            track = gateway.readers.opened(
                tenant=ANONYMOUS, user=user, reader="human", declared_rate=None, now=now
            )
            return track.estimate(now).source

        now = time.monotonic()
        name = LearnedRates(key=crew[0].learning_key).name(tenant=ANONYMOUS, user="ann", reader="human")
        gateways[0].readers.learn(
            _ReadSlowly(reader="human", declared_rate=None, name=name, now=now), now=now
        )
        await eventually(
            lambda: [source(gateway, "ann") for gateway in gateways] == ["learned"] * 3, "all know her"
        )
        assert [source(gateway, "bob") for gateway in gateways] == ["model"] * 3


class _ReadSlowly(ReaderTrack):
    def watched(self) -> Watched:
        return Watched(ratio=0.5, seconds=30.0)


_WELCOME = msgspec.structs.replace(WELCOME, policies=["fcfs", "adaptive"])


def _rid(client: SocketClient) -> str:
    return client.headers["x-tokenflow-stream"].partition(".")[0]
