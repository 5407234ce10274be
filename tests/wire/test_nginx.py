"""Cases 22 and 23 of docs/wire.md: a real nginx in between, as it comes and with gzip, holds nothing back."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import Hold, Pause, ReplayEngine, Script, Send
from support.wire import DONE, check_profile, text_chunk
from tokenflow_bench.processes import find_nginx

CHAT = "/v1/chat/completions"
FIRST, SECOND = text_chunk("a"), text_chunk("b")
REST = text_chunk(None, finish="stop") + DONE
HELD_S = 0.5
"""How long the control waits for what a buffering proxy holds back."""

_NGINX = """
daemon off; pid {folder}/pid; error_log stderr warn; worker_processes 1; {user}
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  gzip {gzip}; gzip_types *; gzip_proxied any; gzip_min_length 1;
  server {{
    listen unix:{folder}/socket;
    location / {{ proxy_pass {url}; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""

pytestmark = pytest.mark.skipif(
    find_nginx() is None, reason="nginx is missing: apt-get install nginx-light to try the proxies in between"
)


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.recordings("models")
    scripts["/v1/models"] = scripts["models"]
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "link": "off"}) as gateway:
        yield gateway
        await gateway.everything_released()


@asynccontextmanager
async def nginx(folder: Path, upstream: str, *, gzip: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an nginx that buffers, as it does by itself, in front of `upstream`."""
    binary = find_nginx()
    assert binary is not None
    config = folder / "nginx.conf"
    user = "user root;" if os.getuid() == 0 else ""
    config.write_text(_NGINX.format(folder=folder, user=user, url=upstream, gzip="on" if gzip else "off"))
    process = await asyncio.create_subprocess_exec(binary, "-c", config, "-p", folder, "-e", "stderr")
    try:
        address = folder / "socket"
        await eventually(lambda: address.exists() or process.returncode is not None, "nginx has started")
        transport = httpx.AsyncHTTPTransport(uds=str(address))
        async with httpx.AsyncClient(transport=transport, base_url="http://nginx", timeout=10) as client:
            yield client
    finally:
        process.terminate()
        await process.wait()


@pytest.fixture
def folder(private_runtime: str) -> Path:
    """Short, because the address of nginx's socket is limited to 107 bytes."""
    return Path(private_runtime)


def asks(model: str) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("gzip", [False, True], ids=["plain", "gzip"])
async def test_case_22_a_proxy_that_buffers_delays_nothing(
    gateway: RunningGateway, engine: ReplayEngine, folder: Path, *, gzip: bool
) -> None:
    """The engine goes on only when the client has what came before."""
    second, rest = asyncio.Event(), asyncio.Event()
    engine.scripts["gated"] = Script(steps=[Send(FIRST), Hold(second), Send(SECOND), Hold(rest), Send(REST)])
    async with (
        nginx(folder, gateway.base_url, gzip=gzip) as client,
        client.stream(
            "POST", CHAT, json=asks("gated"), headers={"accept-encoding": "gzip" if gzip else "identity"}
        ) as answer,
    ):
        unzip = zlib.decompressobj(wbits=31)
        body = b""
        async for part in answer.aiter_raw():
            body += unzip.decompress(part) if gzip else part
            if body == FIRST:
                second.set()
            elif body == FIRST + SECOND:
                rest.set()
    assert answer.headers.get("content-encoding") == ("gzip" if gzip else None)
    assert body == FIRST + SECOND + REST
    check_profile(body)


async def test_case_22_control_without_our_headers_the_first_token_waits(
    engine: ReplayEngine, folder: Path
) -> None:
    """The same nginx straight before the engine: it keeps the first event until the stream ends."""
    rest = asyncio.Event()
    engine.scripts["gated"] = Script(steps=[Send(FIRST), Hold(rest), Send(REST)])
    async with nginx(folder, engine.base_url) as client:
        answer = asyncio.create_task(client.post(CHAT, json=asks("gated")))
        await engine.request(0)
        done, _ = await asyncio.wait([answer], timeout=HELD_S)
        assert not done
        rest.set()
        assert (await answer).content == FIRST + REST


@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "nginx"])
async def test_case_23_two_events_20_ms_apart_are_two_reads(
    gateway: RunningGateway, engine: ReplayEngine, folder: Path, *, proxied: bool
) -> None:
    """Nearly always: a machine that stands still for 20 ms may join two."""
    events = [text_chunk(str(number)) for number in range(20)]
    apart = [step for event in events for step in (Send(event), Pause(0.02))]
    engine.scripts["apart"] = Script(steps=[*apart, Send(REST)])
    async with nginx(folder, gateway.base_url) as through:
        client = through if proxied else gateway.client
        async with client.stream("POST", CHAT, json=asks("apart")) as answer:
            reads = [part async for part in answer.aiter_raw()]
    assert b"".join(reads) == b"".join(events) + REST
    assert len(set(reads) & set(events)) >= 16
