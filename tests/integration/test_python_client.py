"""The Python client on real sockets: openai with httpx and httpx2, sync and async, on the documented wire."""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
import socket
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest

import tokenflow_client
from support.python_client_server import DONE, App, ProgressServer, Refusal, eventually, gated, text_event
from support.replay_engine import Never, Script, Send
from support.scenarios import faults, recordings
from support.transcripts import load
from tokenflow_client import TokenFlowReader
from tokenflow_client._client import RECEIVE_BUFFER_BYTES
from tokenflow_client._track import HEARTBEAT_S, STILL_S

pytestmark = pytest.mark.timeout(60)
RECORDED = load("chat_stream_usage")
ANSWER = "The capital of France is Paris."
WORDS = [f"word{number} " for number in range(12)]
EVENTS = [text_event(word) for word in WORDS]
STANDS_STILL_S = 0.3
COMES_BACK_S = 2.0
MORE_THAN_BUFFERED = 300  # chunks of 260 bytes
NOTICED_S = 0.2
"""Within which the gateway is to know of a pause."""

CLOSES_S = 5.0
FORGETFUL = """
import sys, openai, tokenflow_client
http = tokenflow_client.http_client(kind="voice")
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="k", http_client=http)
list(client.chat.completions.create(model="m", messages=[], stream=True))
print(http.tokenflow.statistics().open, "followed", flush=True)
"""

Library = Literal["httpx", "httpx2"]
EVERY_CLIENT = pytest.mark.parametrize(
    ("library", "is_async"),
    [("httpx", False), ("httpx2", False), ("httpx", True), ("httpx2", True)],
    ids=["httpx", "httpx2", "httpx-async", "httpx2-async"],
)


@asynccontextmanager
async def connected(
    server: ProgressServer, library: Library, is_async: bool, **settings: Any
) -> AsyncIterator[App]:
    app = App(server.base_url, library, is_async)
    app.connect(**settings)
    try:
        yield app
    finally:
        await app.close()


def reporters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tokenflow-reports"]


# ---- nothing is lost, nothing is in the way ----


@EVERY_CLIENT
async def test_the_answer_is_what_it_was(library: Library, is_async: bool) -> None:
    """The text, and a last report with all of its content events; afterwards nothing is left."""
    async with ProgressServer(recordings("chat_stream_usage")) as server:
        async with connected(server, library, is_async, rate=5.5, sla="gold") as app:
            await app.ask("chat_stream_usage", extra_headers={"X-TokenFlow-SLA": "silver"})
            assert await app.take_all() == ANSWER
        await server.reported(lambda report: report["tokens"] == 7)
        seen = server.requests[0].headers
        assert (seen["x-tokenflow-rate"], seen["x-tokenflow-reader"]) == ("5.5", "human")
        assert seen["x-tokenflow-sla"] == "silver", "what the caller sets for one request wins"
        assert seen["accept-encoding"] == "identity"
        assert not server.faults
        assert app.statistics().open == 0
        assert not reporters()
        await eventually(lambda: server.open_connections == 0, "all connections are closed")


@EVERY_CLIENT
async def test_other_requests_are_left_alone(library: Library, is_async: bool) -> None:
    """An answer in one piece: no headers, no reports."""
    async with ProgressServer(recordings("chat_plain")) as server:
        async with connected(server, library, is_async, rate=5) as app:
            plain = await app.ask("chat_plain", stream=False)
            assert plain.choices[0].message.content == ANSWER
        assert "x-tokenflow-rate" not in server.requests[0].headers
        assert not server.posts


@EVERY_CLIENT
async def test_without_a_gateway_it_is_an_ordinary_client(library: Library, is_async: bool) -> None:
    """No `X-TokenFlow-Stream` in the answer. Control: the first test."""
    async with ProgressServer(recordings("chat_stream_usage")) as server:
        server.offers_capability = False
        async with connected(server, library, is_async) as app:
            await app.ask("chat_stream_usage")
            assert await app.take_all() == ANSWER
            assert (app.statistics().untracked, app.statistics().tracked) == (1, 0)
        assert not server.posts


@EVERY_CLIENT
async def test_a_body_that_somebody_compressed(library: Library, is_async: bool) -> None:
    """Against what was asked for: it is read as ever, and not reported on."""
    headers = {"content-type": "text/event-stream", "content-encoding": "gzip"}
    script = Script(headers=headers, steps=[Send(gzip.compress(RECORDED.data))])
    async with ProgressServer({"m": script}) as server:
        async with connected(server, library, is_async) as app:
            await app.ask()
            assert await app.take_all() == ANSWER
            assert app.statistics().untracked == 1
        assert not server.posts


@EVERY_CLIENT
async def test_every_cut_of_the_bytes(library: Library, is_async: bool) -> None:
    """Byte by byte, and with CRLF."""
    async with ProgressServer(faults(RECORDED)) as server, connected(server, library, is_async) as app:
        for model in ("byte-by-byte", "crlf"):
            told = len(server.received)
            await app.ask(model)
            assert await app.take_all() == ANSWER
            await server.reported(lambda report: report["tokens"] == 7, after=told)


@EVERY_CLIENT
async def test_an_event_far_larger_than_the_receive_buffer(library: Library, is_async: bool) -> None:
    """200 kB through 4 kB."""
    long = "long " * 40_000
    script = Script(steps=[Send(text_event(long)), Send(DONE)])
    async with ProgressServer({"m": script}) as server, connected(server, library, is_async) as app:
        await app.ask()
        assert await app.take_all() == long


# ---- what is told ----


@EVERY_CLIENT
async def test_reading_is_told_by_an_ordinary_loop(library: Library, is_async: bool) -> None:
    """All of the answer arrives in one read; the reports follow what the application has asked for."""
    gate = asyncio.Event()
    async with ProgressServer({"m": gated(EVENTS, gate)}) as server:
        async with connected(server, library, is_async) as app:
            await app.ask()
            for taken in range(1, 5):
                assert await app.take() == WORDS[taken - 1]
                await server.reported(lambda report, read=taken - 1: report["tokens"] == read)
            assert max(report["tokens"] for report in server.received) == 3
            gate.set()
            assert await app.take_all() == "".join(WORDS[4:])
            await server.reported(lambda report: report["tokens"] == len(WORDS))
        assert [report["tokens"] for report in server.received] == sorted(
            report["tokens"] for report in server.received
        )
        assert not server.faults


@EVERY_CLIENT
async def test_a_loop_that_stops_asking_has_paused(library: Library, is_async: bool) -> None:
    """Told when it is certain, and its end at once."""
    gate = asyncio.Event()
    async with (
        ProgressServer({"m": gated(EVENTS, gate)}) as server,
        connected(server, library, is_async) as app,
    ):
        await app.ask()
        began_s = asyncio.get_running_loop().time()
        await app.take()
        pause = await server.reported(lambda report: report["paused"])
        assert pause.at_s - began_s > STILL_S
        asked_s, told = asyncio.get_running_loop().time(), len(server.received)
        await app.take()
        end = await server.reported(lambda report: not report["paused"], after=told)
        assert end["tokens"] == 1
        assert end.at_s - asked_s < HEARTBEAT_S / 2
        gate.set()
        await app.take_all()


@EVERY_CLIENT
async def test_a_pause_is_told_at_once(library: Library, is_async: bool) -> None:
    """And its end, by a reader given to one request."""
    gate = asyncio.Event()
    reader = TokenFlowReader(rate=4.0, kind="voice", ttft_ms=300)
    async with ProgressServer({"m": gated(EVENTS, gate)}) as server:
        async with connected(server, library, is_async) as app:
            await app.ask(extra_headers=reader.headers())
            await server.reported(lambda report: report["paused"] is False)
            loop, delays_s = asyncio.get_running_loop(), []
            for step, paused in ((reader.pause, True), (reader.resume, False)) * 3:
                at_s, told = loop.time(), len(server.received)
                step()
                report = await server.reported(
                    lambda report, told=paused: report["paused"] is told, after=told
                )
                delays_s.append(report.at_s - at_s)
            assert sorted(delays_s)[2] < NOTICED_S, "the better half; this machine may be busy"
            gate.set()
            await app.take_all()
        seen = server.requests[0].headers
        assert (seen["x-tokenflow-reader"], seen["x-tokenflow-ttft-ms"]) == ("voice", "300")
        assert "x-tokenflow-client-reader" not in seen
        assert not server.faults


@EVERY_CLIENT
async def test_a_voice_says_how_far_it_is(library: Library, is_async: bool) -> None:
    """Its player takes everything at once, which is not reading; then what it says, in either unit."""
    gate = asyncio.Event()
    reader = TokenFlowReader(rate=4.0, kind="voice")
    async with (
        ProgressServer({"m": gated(EVENTS, gate)}) as server,
        connected(server, library, is_async) as app,
    ):
        await app.ask(extra_headers=reader.headers())
        for _ in WORDS:
            await app.take()
        reader.shown(chars=20)
        await server.reported(lambda report: report["chars"] == 20)
        reader.shown(tokens=9)
        said = await server.reported(lambda report: report["tokens"] == 9)
        assert said["rate"] == 4.0
        assert {report["tokens"] for report in server.received} <= {0, 9, None}
        gate.set()
        await app.take_all()


@EVERY_CLIENT
async def test_a_relay_reports_nothing(library: Library, is_async: bool) -> None:
    """What it reads is not what its users read: headers only. Control: the first test."""
    async with ProgressServer(recordings("chat_stream_usage")) as server:
        async with connected(server, library, is_async, rate=5, evidence="none") as app:
            await app.ask("chat_stream_usage")
            assert await app.take_all() == ANSWER
        assert server.requests[0].headers["x-tokenflow-rate"] == "5"
        assert not server.posts


# ---- after the answer ----


@EVERY_CLIENT
async def test_a_voice_goes_on_until_all_is_heard(library: Library, is_async: bool) -> None:
    """The answer is complete, closed and forgotten; its text is heard afterwards, and told."""
    reader = TokenFlowReader(kind="voice")
    async with (
        ProgressServer({"m": Script(steps=[Send(b"".join(EVENTS) + DONE)])}) as server,
        connected(server, library, is_async) as app,
    ):
        await app.ask(extra_headers=reader.headers())
        assert await app.take_all() == "".join(WORDS)
        app.stream = None
        gc.collect()
        for heard in (1, 5):
            reader.shown(tokens=heard)
            await server.reported(lambda report, heard=heard: report["tokens"] == heard)
        assert app.statistics().open == 1
        reader.shown(chars=len("".join(WORDS)))
        reader.shown(tokens=len(WORDS))
        await server.reported(lambda report: report["tokens"] == len(WORDS))
        await eventually(lambda: app.statistics().open == 0, "the stream is not followed any more")
        assert not server.faults


@EVERY_CLIENT
async def test_a_voice_that_is_cut_off_is_not_waited_for(
    library: Library, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, or by an answer that is left before its end; closing the client waits for none of them."""
    monkeypatch.setattr("tokenflow_client._reporter.CLOSE_S", 3 * CLOSES_S)  # what a wait would take
    gate = asyncio.Event()
    scripts = {
        "whole": Script(steps=[Send(b"".join(EVENTS) + DONE)]),
        "open": gated(EVENTS, gate),
    }
    reader = TokenFlowReader(kind="voice")
    async with ProgressServer(scripts) as server, connected(server, library, is_async) as app:
        await app.ask("whole", extra_headers=reader.headers())
        await app.take_all()
        reader.shown(tokens=2)
        reader.close()
        await server.reported(lambda report: report["tokens"] == 2)
        await eventually(lambda: app.statistics().open == 0, "the voice is gone")

        await app.ask("open", extra_headers=reader.headers())
        await app.take()
        await app.leave()
        await eventually(lambda: app.statistics().open == 0, "the answer was left")

        await app.ask("whole", extra_headers=reader.headers())
        await app.take_all()
        assert app.statistics().open == 1
        began_s = asyncio.get_running_loop().time()
        await app.close()
        assert asyncio.get_running_loop().time() - began_s < CLOSES_S
        assert not reporters()


async def test_a_program_ends_while_its_voice_is_followed() -> None:
    """Although nobody closed the client: the thread does not keep the process."""
    async with ProgressServer({"m": Script(steps=[Send(b"".join(EVENTS) + DONE)])}) as server:
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FORGETFUL, server.base_url),
            env={**os.environ, "PYTHONPATH": str(Path(tokenflow_client.__file__).parents[1])},
            stdout=asyncio.subprocess.PIPE,
        )
        assert program.stdout is not None
        assert await program.stdout.readline() == b"1 followed\n"
        async with asyncio.timeout(CLOSES_S):
            assert await program.wait() == 0


# ---- reports never matter to the stream ----

REFUSALS = {
    "403": (Refusal(403), "refused"),
    "404": (Refusal(404), "late"),
    "429": (Refusal(429, headers={"retry-after": "60"}), "dropped"),
    "500": (Refusal(500), "dropped"),
    "never": (Refusal(200, steps=[Never()]), "dropped"),
    "no answer at all": (Refusal(200, steps=[Send(b"x"), Never()]), "dropped"),
}


@EVERY_CLIENT
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_reports_that_fail_are_counted_and_nothing_else(
    library: Library, is_async: bool, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole answer is read while the report is still not answered, and once is enough."""
    monkeypatch.setattr("tokenflow_client._transport.POST_TIMEOUT_S", 0.3)
    gate = asyncio.Event()
    async with ProgressServer({"m": gated(EVENTS, gate)}) as server:
        server.refusal, count = REFUSALS[refusal]
        async with connected(server, library, is_async) as app:
            await app.ask()
            await eventually(lambda: server.posts == 1, "a report was tried")
            gate.set()
            assert await app.take_all() == "".join(WORDS)
            await eventually(lambda: getattr(app.statistics(), count) >= 1, f"it was counted as {count}")
            assert app.statistics().sent == 0
        assert server.posts <= 2


# ---- leaving ----


async def _leaves(app: App) -> None:
    await app.leave()


async def _forgets(app: App) -> None:
    """Drops the answer without closing it; the thread of the last chunk may hold it a moment longer."""
    answer = weakref.ref(app.stream)
    app.stream = None

    def is_freed() -> bool:
        gc.collect()
        return answer() is None

    await eventually(is_freed, "nothing holds the answer")
    gc.collect()  # what the thread let go of between the two lines above


async def _closes(app: App) -> None:
    await app.close()


@EVERY_CLIENT
@pytest.mark.parametrize("way", [_leaves, _forgets, _closes])
async def test_leaving_releases_everything(
    library: Library, is_async: bool, way: Callable[[App], Any]
) -> None:
    """The engine's answer is disconnected, and the reports of this stream end."""
    async with ProgressServer(faults(RECORDED)) as server:
        async with connected(server, library, is_async) as app:
            await app.ask("endless")
            for _ in range(5):
                await app.take()
            assert app.statistics().open == 1
            await way(app)
            async with asyncio.timeout(10):
                await server.requests[0].disconnected.wait()
            await eventually(lambda: app.statistics().open == 0, "the stream is not followed any more")
        assert not reporters()
        await eventually(lambda: server.open_connections == 0, "all connections are closed")


@EVERY_CLIENT
async def test_a_broken_stream_is_told_as_ever(library: Library, is_async: bool) -> None:
    """By the exception that the SDK has for it; openai 1.x lets the library's own through."""
    async with ProgressServer(faults(RECORDED)) as server, connected(server, library, is_async) as app:
        await app.ask("closes-mid-event")
        with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
            await app.take_all()
        await eventually(lambda: app.statistics().open == 0, "the stream is not followed any more")


@EVERY_CLIENT
async def test_nobody_there_is_told_as_ever(library: Library, is_async: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = App(f"http://127.0.0.1:{port}", library, is_async)
    app.connect()
    with pytest.raises(openai.APIConnectionError):
        await app.ask()
    await app.close()


# ---- the receive buffer ----


@EVERY_CLIENT
async def test_what_is_not_read_stays_with_the_server(library: Library, is_async: bool) -> None:
    """What TCP takes for delivered when one chunk was asked for. Control: other buffers, and machines."""
    small = await _acknowledged_bytes(library, is_async)
    assert small < 20_000
    assert await _acknowledged_bytes(library, is_async, receive_buffer_bytes=None) > 3 * small
    assert await _acknowledged_bytes(library, is_async, kind="machine") > 3 * small


@EVERY_CLIENT
async def test_a_reader_who_comes_back_finds_the_stream_alive(library: Library, is_async: bool) -> None:
    """At once, and not when the server has sent again what the kernel dropped. Control: the next test."""
    async with ProgressServer(faults(RECORDED)) as server, connected(server, library, is_async) as app:
        await app.ask("endless")
        await app.take()
        await _stands_still(server)
        async with asyncio.timeout(COMES_BACK_S):
            for _ in range(MORE_THAN_BUFFERED):
                await app.take()


async def test_the_usual_way_to_set_the_buffer_would_not_do() -> None:
    """`socket_options` are set too late: this is why the client makes its connections itself."""
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)]
    transport = httpx.AsyncHTTPTransport(socket_options=options)
    async with ProgressServer(faults(RECORDED)) as server, httpx.AsyncClient(transport=transport) as client:
        body = {"model": "endless", "stream": True}
        async with client.stream("POST", f"{server.base_url}/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await _stands_still(server)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(COMES_BACK_S):
                    for _ in range(2 * MORE_THAN_BUFFERED):
                        await anext(lines)


async def _acknowledged_bytes(library: Library, is_async: bool, **settings: Any) -> int:
    """By the client's kernel, of an endless answer that is not read on."""
    async with (
        ProgressServer(faults(RECORDED)) as server,
        connected(server, library, is_async, **settings) as app,
    ):
        await app.ask("endless")
        await app.take()
        await _stands_still(server)
        return server.acknowledged_bytes()


async def _stands_still(server: ProgressServer) -> None:
    """Wait until nothing more can be sent."""
    loop, seen = asyncio.get_running_loop(), server.requests[0]
    since = {"sent": -1, "at_s": loop.time()}

    def still() -> bool:
        if seen.sent_bytes != since["sent"]:
            since.update(sent=seen.sent_bytes, at_s=loop.time())
        return loop.time() - since["at_s"] > STANDS_STILL_S

    await eventually(still, "the server cannot send any more")


@EVERY_CLIENT
async def test_a_library_built_otherwise_keeps_working(
    library: Library, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the place for small buffers: the system's ones, and all else as it is."""
    core = {"httpx": "httpcore", "httpx2": "httpcore2"}[library]
    missing = "anyio.AnyIOStream" if is_async else "sync.SyncStream"
    async with ProgressServer(recordings("chat_stream_usage")) as server:
        with monkeypatch.context() as patch:
            patch.delattr(f"{core}._backends.{missing}")
            app = App(server.base_url, library, is_async)
            app.connect()
        patched = app.http.tokenflow._paced._pool._network_backend
        assert type(patched).__module__.startswith(core)
        monkeypatch.undo()
        await app.ask("chat_stream_usage")
        assert await app.take_all() == ANSWER
        await app.close()


def test_the_library_is_that_of_the_installed_openai() -> None:
    """The SDK takes the client as its own."""
    with tokenflow_client.http_client() as client:
        assert isinstance(client, openai.DefaultHttpxClient.__mro__[1])
