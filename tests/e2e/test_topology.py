"""The deployment of docker/compose.gpu.yaml as processes: what is lost when a part goes, and how long for.

Streams run through TLS, with the proxy's configuration as it is shipped.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from support import docker_stand_in
from support.deployment import ROOT
from support.redis_server import needs_redis
from support.topology import Part, Topology, topology
from tokenflow_bench.processes import find_nginx

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_nginx() is None, reason="nginx is missing: apt-get install nginx-light"),
    needs_redis,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing: apt-get install openssl"),
]

CHAT = "/v1/chat/completions"
TOKENS_PER_S = 40.0
DONE = "data: [DONE]"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Topology]:
    async with topology(tmp_path, tokens_per_s=TOKENS_PER_S) as running:
        yield running


@pytest.fixture
async def client(running: Topology) -> AsyncIterator[httpx.AsyncClient]:
    """Of the proxy, over TLS."""
    async with running.proxy.client() as client:
        yield client


@dataclass
class Stream:
    """One client's stream, read to its end."""

    status: int = 0
    at_s: list[float] = field(default_factory=list)
    """When each event came, after the request."""
    text: str = ""
    broken: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.broken and "error" not in self.text and DONE in self.text

    async def read(self, client: httpx.AsyncClient, *, tokens: int, request_id: str = "r") -> Stream:
        body = {"model": "recorded", "stream": True, "max_tokens": tokens, "messages": []}
        began = time.monotonic()
        try:
            async with client.stream("POST", CHAT, json=body, headers={"x-request-id": request_id}) as answer:
                self.status = answer.status_code
                async for line in answer.aiter_lines():
                    if line:
                        self.at_s.append(time.monotonic() - began)
                        self.text += f"{line}\n"
                        self.begun.set()
        except httpx.TransportError:
            self.broken = True
        finally:
            self.begun.set()
        return self


@dataclass
class Load:
    """Streams that run at the same time, each known by the gateway and the engine that it is on."""

    streams: dict[str, Stream]
    tasks: list[asyncio.Task[Stream]]

    @classmethod
    async def of(cls, client: httpx.AsyncClient, count: int, *, tokens: int) -> Load:
        """Returns once all have begun."""
        streams = {f"load-{number}": Stream() for number in range(count)}
        tasks = [
            asyncio.create_task(stream.read(client, tokens=tokens, request_id=name))
            for name, stream in streams.items()
        ]
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


async def normal_after_s(client: httpx.AsyncClient, *, within_s: float = 15.0, streak: int = 6) -> float:
    """Seconds until the first of several requests in a row that all succeed."""
    began, first, good = time.monotonic(), 0.0, 0
    while good < streak:
        assert time.monotonic() - began < within_s, "it is not normal again"
        asked = time.monotonic() - began
        stream = await Stream().read(client, tokens=2)
        first, good = (first if good else asked, good + 1) if stream.whole else (0.0, 0)
    return first


async def test_events_come_through_tls_as_they_are_made(client: httpx.AsyncClient) -> None:
    stream = await Stream().read(client, tokens=40)
    assert stream.whole
    assert stream.at_s[0] < 0.5
    assert stream.at_s[-1] - stream.at_s[0] > 0.8 * 40 / TOKENS_PER_S, "they came at the engine's pace"
    gaps = [after - before for before, after in zip(stream.at_s, stream.at_s[1:], strict=False)]
    assert max(gaps) < 0.4, "none was held back"


async def test_both_gateways_get_their_share_and_metrics_stay_inside(
    client: httpx.AsyncClient, running: Topology
) -> None:
    load = await Load.of(client, 8, tokens=20)
    shares = [len(await load.on(gateway)) for gateway in running.gateways]
    assert shares == [4, 4]
    await load.end()
    assert len(load.whole) == 8
    assert (await client.get("/metrics")).status_code == 404
    async with running.gateways[0].client() as direct:
        assert "tokenflow_streams_ended_total" in (await direct.get("/metrics")).text


async def test_a_gateway_that_is_killed_costs_its_own_streams_only(
    client: httpx.AsyncClient, running: Topology
) -> None:
    """Requests that come meanwhile go to the other one: none fails."""
    load = await Load.of(client, 10, tokens=120)
    doomed = running.gateways[0]
    its = await load.on(doomed)
    await doomed.end(signal.SIGKILL)
    after_s = await normal_after_s(client)
    await load.end()
    assert set(load.streams) - load.whole == its
    assert all(load.streams[name].broken for name in its), "no client may take it for an end"
    assert after_s < 0.5
    await doomed.start()
    again = await Load.of(client, 8, tokens=20)
    assert await again.on(doomed), "it takes part again"
    await again.end()
    assert len(again.whole) == 8
    _report("gateway killed", lost=len(its), of=10, normal_after_s=after_s)


async def test_a_gateway_that_goes_in_order_costs_nothing(
    client: httpx.AsyncClient, running: Topology
) -> None:
    """Its streams end; what comes meanwhile is answered by the other one, though its port is still open."""
    load = await Load.of(client, 8, tokens=60)
    running.gateways[0].tell(signal.SIGTERM)
    await _until_it_goes(running.gateways[0])
    meanwhile = [await Stream().read(client, tokens=2) for _ in range(10)]
    assert all(stream.whole for stream in meanwhile)
    await load.end()
    assert load.whole == set(load.streams)


async def test_an_engine_that_is_killed_costs_its_own_streams_only(
    client: httpx.AsyncClient, running: Topology
) -> None:
    """They end with an error event; requests that come meanwhile are served by the other engine."""
    load = await Load.of(client, 12, tokens=120)
    doomed = running.engines[0]
    its = {name for gateway in running.gateways for name in await load.on(gateway, doomed)}
    assert its
    await doomed.end(signal.SIGKILL)
    after_s = await normal_after_s(client)
    await load.end()
    assert set(load.streams) - load.whole == its
    for name in its:
        assert '"error"' in load.streams[name].text
        assert load.streams[name].text.rstrip().endswith(DONE)
    assert after_s < 0.5
    _report("engine killed", lost=len(its), of=12, normal_after_s=after_s)


async def test_redis_may_go_and_come_back(client: httpx.AsyncClient, running: Topology) -> None:
    """No stream and no request is lost; each gateway goes on by itself, says so, and joins again."""
    load = await Load.of(client, 10, tokens=200)
    await _all_say(running.gateways, "tokenflow_replicas", 2.0, since=0.0)
    running.redis.kill()
    began = time.monotonic()
    meanwhile = [await Stream().read(client, tokens=2) for _ in range(10)]
    assert all(stream.whole for stream in meanwhile)
    noticed_s = await _all_say(running.gateways, "tokenflow_redis_up", 0.0, since=began)
    await asyncio.to_thread(running.redis.start)
    began = time.monotonic()
    again_s = await _all_say(running.gateways, "tokenflow_redis_up", 1.0, since=began)
    await load.end()
    assert load.whole == set(load.streams)
    assert (await Stream().read(client, tokens=2)).whole
    _report(f"Redis killed (noticed after {noticed_s:.1f} s)", lost=0, of=20, normal_after_s=again_s)


async def test_reports_count_through_whichever_gateway(client: httpx.AsyncClient, running: Topology) -> None:
    """The proxy sends them where fewer connections are: away from the gateway that has the stream."""
    body = {"model": "recorded", "stream": True, "max_tokens": 200, "messages": []}
    async with client.stream("POST", CHAT, json=body) as answer:
        rid, _, capability = answer.headers["x-tokenflow-stream"].partition(".")
        parts = answer.aiter_raw()
        await anext(parts)
        for seq in range(8):
            report = {"seq": seq, "tokens": 1, "paused": True}
            told = await client.post(
                f"/v1/streams/{rid}/progress", json={"capability": capability, "reports": [report]}
            )
            assert told.status_code == 200, told.text
            assert (told.json()["accepted"], told.json()["state"]) == (1, "paused")
    forwarded = [await metric(gateway, "tokenflow_progress_forwarded_total") for gateway in running.gateways]
    assert sorted(forwarded) == [0.0, 8.0]


async def test_the_quick_start_of_the_docs(running: Topology, tmp_path: Path) -> None:
    """As it stands there, in a shell; ``docker compose`` is a stand-in for what runs already."""
    docs = (ROOT / "docs/deployment.md").read_text()
    (commands,) = re.findall(r"<!-- quick start -->\n```sh\n(.*?)```", docs, re.DOTALL)
    programs, clone = tmp_path / "programs", tmp_path / "clone"
    for folder in (programs, clone / "docker"):
        folder.mkdir(parents=True)
    docker_stand_in.install(programs)
    environment = {
        **running.gateways[0].environment(),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOST": running.proxy.url.removeprefix("https://"),
        "MODEL": "recorded",
        "CURL_CA_BUNDLE": str(running.proxy.verify),
    }
    shell = await asyncio.create_subprocess_exec(
        "bash", "-e", "-o", "pipefail", "-c", commands, cwd=clone, env=environment, stdout=PIPE, stderr=STDOUT
    )
    said = (await shell.communicate())[0].decode()
    assert shell.returncode == 0, said
    assert said.count("data: {") >= 40
    assert DONE in said
    assert re.search(r"^chat\b.*\b40\b", said, re.MULTILINE), said
    monitor = (clone / "docker/keys/monitor").read_text()
    for gateway in running.gateways:
        async with gateway.client() as client:
            assert (await client.get("/metrics")).status_code == 401
            scrape = await client.get("/metrics", headers={"authorization": f"Bearer {monitor}"})
            assert scrape.status_code == 200


async def _until_it_goes(gateway: Part) -> None:
    async with asyncio.timeout(10), gateway.client() as client:
        while (await client.get("/health/ready")).status_code == 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


async def metric(gateway: Part, name: str) -> float:
    """A sample without labels, as that gateway has it."""
    async with gateway.client() as client:
        found = re.search(rf"^{name} (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def _all_say(gateways: list[Part], name: str, value: float, *, since: float) -> float:
    """Seconds until the last of them says so."""
    async with asyncio.timeout(20):
        while any([await metric(gateway, name) != value for gateway in gateways]):  # noqa: ASYNC110 - others
            await asyncio.sleep(0.05)
    return time.monotonic() - since


def _report(what: str, *, lost: int, of: int, normal_after_s: float) -> None:
    """Numbers for docs/deployment.md, where they are wanted."""
    if path := os.environ.get("TOKENFLOW_TOPOLOGY_RESULTS"):
        with Path(path).open("a") as results:
            results.write(f"| {what} | {lost} of {of} | {normal_after_s:.2f} s |\n")
