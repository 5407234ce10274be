"""The deployment of docker/compose.gpu.yaml as processes: what is lost when a part goes, and how long for.

Streams run through TLS, with the proxy's configuration as it is shipped.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT, Popen

import httpx
import pytest
from redis import AuthenticationError, Redis

from support import docker_stand_in
from support.deployment import ROOT, compose
from support.topology import Part, Topology, needs_topology, topology
from support.topology_load import CHAT, DONE, Load, Stream, metric, until

pytestmark = needs_topology

TOKENS_PER_S = 40.0
_LIMITS = {"tenants": {"anonymous": {"limits": {"requests_per_minute": 100_000}}}}
"""Never reached, but every request asks Redis."""


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Topology]:
    async with topology(tmp_path, tokens_per_s=TOKENS_PER_S, settings=_LIMITS) as running:
        yield running


@pytest.fixture
async def client(running: Topology) -> AsyncIterator[httpx.AsyncClient]:
    """Of the proxy, over TLS."""
    async with running.proxy.client() as client:
        yield client


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
    stream = await Stream().read(client, tokens=80)
    assert stream.whole
    assert stream.at_s[0] < 1.0, "of the two seconds that the engine takes"
    assert stream.at_s[-1] - stream.at_s[0] > 0.8 * 80 / TOKENS_PER_S, "they came at the engine's pace"
    gaps = [after - before for before, after in pairwise(stream.at_s)]
    assert median(gaps) > 0.5 / TOKENS_PER_S, "one by one: of those held back most would come together"
    assert max(gaps) < 1.0, "none was held back"


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


async def test_a_gateway_that_starts_holds_nobody_up(client: httpx.AsyncClient, running: Topology) -> None:
    """Its first look at a silent engine takes seconds; until it can answer the proxy asks the other one."""
    starting, other = running.gateways
    await starting.end(signal.SIGKILL)
    running.engines[0].tell(signal.SIGSTOP)
    await _all_say([other], 'tokenflow_engine_healthy{engine="engine-1"}', 0.0)
    start, streams = asyncio.create_task(starting.start()), []
    while not start.done():
        streams.append(await Stream().read(client, tokens=2))
    await start
    assert len(streams) > 10
    assert all(stream.whole for stream in streams)
    assert max(stream.first_s for stream in streams) < 1.0


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


async def test_redis_may_go_and_come_back(client: httpx.AsyncClient, running: Topology) -> None:
    """No stream and no request is lost; each gateway goes on by itself, says so, and joins again."""
    load = await Load.of(client, 10, tokens=200)
    await _all_say(running.gateways, "tokenflow_replicas", 2.0)
    running.redis.kill()
    meanwhile = [await Stream().read(client, tokens=2) for _ in range(10)]
    assert all(stream.whole for stream in meanwhile)
    await _all_say(running.gateways, "tokenflow_redis_up", 0.0)
    await asyncio.to_thread(running.redis.start)
    await _all_say(running.gateways, "tokenflow_redis_up", 1.0)
    await load.end()
    assert load.whole == set(load.streams)
    assert (await Stream().read(client, tokens=2)).whole


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


def quick_start() -> str:
    docs = (ROOT / "docs/deployment.md").read_text()
    (commands,) = re.findall(r"<!-- quick start -->\n```sh\n(.*?)```", docs, re.DOTALL)
    return str(commands)


async def follow(commands: str, running: Topology, folder: Path) -> str | None:
    """What is wrong with them, as somebody types them on a clone in `folder`; None: nothing is.

    ``docker compose`` is a stand-in for what runs already.
    """
    programs, clone = folder / "programs", folder / "clone"
    for part in (programs, clone / "docker"):
        part.mkdir(parents=True)
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
    if shell.returncode != 0:
        return f"a command fails: {said}"
    if said.count("data: {") < 40 or DONE not in said:
        return f"no stream: {said}"
    monitor = (clone / "docker/keys/monitor").read_text()
    for gateway in running.gateways:
        async with gateway.client() as client:
            if (await client.get("/metrics")).status_code != 401:
                return "metrics are open"
            scrape = await client.get("/metrics", headers={"authorization": f"Bearer {monitor}"})
            if scrape.status_code != 200:
                return f"Prometheus gets no metrics: {scrape.text}"
    return None if re.search(r"^chat\b.*\b40\b", said, re.MULTILINE) else f"no usage: {said}"


async def test_the_quick_start_of_the_docs(running: Topology, tmp_path: Path) -> None:
    """As it stands there, in a shell. No log of any part has a key in it, or what was asked."""
    assert await follow(quick_start(), running, tmp_path / "typed") is None
    parts = [*running.gateways, *running.engines, running.proxy]
    logs = "".join(path.read_text() for part in parts for path in (part.log, part.folder / "access.log"))
    assert "stream ended" in logs
    assert '"path":"/v1/chat/completions"' in logs
    monitor = (tmp_path / "typed/clone/docker/keys/monitor").read_text()
    secret = monitor.rpartition("-")[2]
    assert monitor.startswith("tf-")
    assert len(secret) > 20
    assert secret not in logs
    assert "capital of France" not in logs


async def test_control_a_quick_start_with_a_fault_is_noticed(running: Topology, tmp_path: Path) -> None:
    """Each command of it is needed as it is."""
    for number, (part, other, wrong) in enumerate(
        (
            (" up --build --detach --wait", " up --build --detach", "the stand-in knows nothing of"),
            ("docker compose -f docker/compose.gpu.yaml up", "true", "nothing is up"),
            ("mkdir -p docker/keys", "true", "docker/keys/monitor"),
            ("--tenant operations --kind monitor", "--kind monitor", "--tenant"),
            ("--kind monitor", "--kind client", "Prometheus gets no metrics"),
            ("/v1/chat/completions", "/v1/chat/completion", "a command fails"),
            ("tokenflow usage --tenant chat", "tokenflow usage --tenant operations", "no usage"),
        )
    ):
        assert part in quick_start()
        commands = quick_start().replace(part, other)
        assert wrong in str(await follow(commands, running, tmp_path / str(number))), part


def test_redis_as_shipped_wants_a_password_that_no_command_line_shows(tmp_path: Path) -> None:
    """The command of compose, with a socket in place of its port; the title is left as the shell made it."""
    shell, flag, script = compose("compose.gpu.yaml")["services"]["redis"]["command"]
    socket, secret = tmp_path / "redis.sock", "not for everybody"
    own = f"redis-server - --port 0 --unixsocket {socket} --dir {tmp_path} --set-proc-title no"
    script = script.replace("$$", "$").replace("redis-server -", own, 1)
    environment = {**os.environ, "REDISCLI_AUTH": secret}
    server = Popen([shell, flag, script], env=environment, stdout=PIPE, stderr=STDOUT, text=True)
    try:
        assert server.stdout is not None
        said = list(takewhile(lambda line: "ready to accept connections" not in line.lower(), server.stdout))
        command_line = Path(f"/proc/{server.pid}/cmdline").read_text()
        assert "--appendonly" in command_line
        assert secret not in "".join((*said, command_line))
        with Redis(unix_socket_path=str(socket), password=secret) as client:
            assert client.ping()
        with (
            Redis(unix_socket_path=str(socket), password="another") as client,
            pytest.raises(AuthenticationError),
        ):
            client.ping()
    finally:
        server.terminate()
        server.communicate()


async def _until_it_goes(gateway: Part) -> None:
    async with gateway.client() as client:

        async def goes() -> bool:
            return (await client.get("/health/ready")).status_code != 200

        await until(goes)


async def _all_say(gateways: list[Part], name: str, value: float) -> None:
    async def do() -> bool:
        return all([await metric(gateway, name) == value for gateway in gateways])

    await until(do)
