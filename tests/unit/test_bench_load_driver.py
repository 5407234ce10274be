"""The driver on real sockets: what it counts, from when, and what it does when answers go wrong."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import replace

import pytest

from support.gateway import eventually, running_gateway
from support.replay_engine import Close, Headers, Hold, Never, Pause, ReplayEngine, Script, Send
from support.scenarios import recordings
from tokenflow_bench.load.driver import Ask, Client, drive
from tokenflow_bench.load.overhead import Overhead, OverheadMeter
from tokenflow_bench.reading import Person

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def token(text: str = "word") -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode()


def ask(due_s: float = 0.0, person: Person | None = None) -> Ask:
    return Ask(due_s=due_s, prompt="hello", output_tokens=8, person=person or Person(5.0))


def client(engine: ReplayEngine, **changes: object) -> Client:
    return replace(Client(url=engine.base_url, model="m"), **changes)  # type: ignore[arg-type]


async def test_counts_content_events_and_their_times() -> None:
    """Three tokens: two in one write, the third after a tenth of a second. The role's event is none."""
    script = Script(steps=[Send(ROLE), Send(token() + token()), Pause(0.1), Send(token()), Send(DONE)])
    async with ReplayEngine({"m": script}) as engine:
        run = await drive(client(engine), [ask()], horizon_s=10)
    (log,) = run.logs
    assert log.is_whole
    first, second, third = log.token_s
    assert first == second
    assert 0.09 <= third - first < 1.0


@pytest.mark.parametrize("name", ["completions_stream_continuous", "chat_stream_usage"])
async def test_counts_as_the_engine_does(name: str) -> None:
    """Recordings of the real engine, with usage in each event or only at the end."""
    route = "/v1/completions" if name.startswith("completions") else "/v1/chat/completions"
    async with ReplayEngine(recordings(name)) as engine:
        run = await drive(client(engine, model=name, route=route), [ask()], horizon_s=10)
        sent = engine.requests[0].json()
    body = b"".join(step.data for step in recordings(name)[name].steps if isinstance(step, Send))
    said = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    usage = said[-1]["usage"]
    assert len(run.logs[0].token_s) == usage["completion_tokens"]
    assert run.logs[0].prompt_tokens == usage["prompt_tokens"]
    assert sent["max_tokens"] == 8
    assert "ignore_eos" not in sent


async def test_late_server_counts_from_the_schedule() -> None:
    """The second request is due before the first is answered, and is sent all the same (an open loop)."""
    gate = asyncio.Event()
    script = Script(steps=[Hold(gate), Send(token()), Send(DONE)])
    async with ReplayEngine({"m": script}) as engine:
        running = asyncio.create_task(drive(client(engine), [ask(), ask(0.05)], horizon_s=10))
        await engine.request(1)
        opened_s = time.monotonic()
        gate.set()
        run = await running
    first, second = run.logs
    assert first.begun_s is not None
    assert first.sent_s is not None
    assert first.due_s <= first.begun_s <= first.sent_s
    assert second.sent_s is not None
    assert second.sent_s - first.sent_s >= 0.04
    assert first.token_s[0] - first.due_s >= second.token_s[0] - second.due_s
    assert time.monotonic() - opened_s < 5


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([Send(token()), Close()], "connection closed"),
        ([Send(token())], "ended without [DONE]"),
        ([Send(token()), Send(b'data: {"error":{"message":"broken"}}\n\n'), Send(DONE)], "broken"),
        ([Send(token()), Send(b"data: {nonsense\n\n")], "not a stream"),
    ],
)
async def test_broken_streams_are_errors(steps: list[object], error: str) -> None:
    async with ReplayEngine({"m": Script(steps=steps)}) as engine:  # type: ignore[arg-type]
        run = await drive(client(engine), [ask()], horizon_s=10)
    (log,) = run.logs
    assert not log.is_whole
    assert error in (log.error or "")
    assert len(log.token_s) == 1


async def test_refusals_are_errors() -> None:
    async with ReplayEngine() as engine:
        run = await drive(client(engine), [ask()], horizon_s=10)
    assert (run.logs[0].error or "").startswith("status 404: no script")


async def test_nobody_listens() -> None:
    async with ReplayEngine() as engine:
        nobody = client(engine)
    run = await drive(nobody, [ask()], horizon_s=10)
    assert (run.logs[0].error or "").startswith("cannot connect")


async def test_gives_up_at_the_horizon() -> None:
    """No end, no error, and the connection is gone."""
    script = Script(steps=[Headers(), Send(token()), Never()])
    async with ReplayEngine({"m": script}) as engine:
        run = await drive(client(engine), [ask(), ask(99.0)], horizon_s=0.3)
        await engine.requests[0].disconnected.wait()
    started, never_due = run.logs
    assert (started.end_s, started.error, len(started.token_s)) == (None, None, 1)
    assert (never_due.sent_s, never_due.end_s) == (None, None)


async def test_declares_rates_and_machines() -> None:
    async with ReplayEngine({"m": Script(steps=[Send(DONE)])}) as engine:
        await drive(client(engine), [ask(person=Person(4.5)), ask(0.1, Person(float("inf")))], horizon_s=10)
        await drive(client(engine, declares_rate=False), [ask(person=Person(4.5))], horizon_s=10)
        person, machine, undeclared = [seen.headers for seen in engine.requests]
    assert person["x-tokenflow-rate"] == "4.500"
    assert machine["x-tokenflow-reader"] == "machine"
    assert "x-tokenflow-rate" not in undeclared


async def test_reports_what_is_read_and_pauses() -> None:
    """Ten tokens a second, all there at once; a pause from 0.2 s on is told, and positions stop in it."""
    gate = asyncio.Event()
    headers = {"content-type": "text/event-stream", "x-tokenflow-stream": "tf-1.secret"}
    answer = Script(headers=headers, steps=[Send(token() * 9), Hold(gate), Send(DONE)])
    ok = Script(headers={"content-length": "2"}, steps=[Send(b"{}")])
    route = "/v1/streams/tf-1/progress"
    async with ReplayEngine({"m": answer, route: ok}) as engine:
        reader = Person.with_pauses(10.0, [(0.25, 0.6)])
        told = client(engine, report_every_s=0.1, pauses="report")
        running = asyncio.create_task(drive(told, [ask(person=reader)], horizon_s=10))
        await engine.request(6)
        gate.set()
        run = await running
        bodies = [seen.json() for seen in engine.requests if seen.path == route]
    assert {body["capability"] for body in bodies} == {"secret"}
    reports = [report for body in bodies for report in body["reports"]]
    assert [report["seq"] for report in reports] == list(range(len(reports)))
    positions = [report["tokens"] for report in reports]
    assert positions == sorted(positions)
    paused = [report for report in reports if report.get("paused")]
    assert len(paused) == 1
    assert paused[0]["tokens"] == 2
    assert positions[-1] > 2
    assert run.report_statuses == {200: len(run.report_statuses) and sum(run.report_statuses.values())}


async def test_who_stops_reading_the_socket_gets_nothing_in_the_pause() -> None:
    """What comes in the pause is seen at its end: as late as the reader's own kernel hands it over."""
    script = Script(steps=[Send(token()), Pause(0.15), Send(token()), Send(DONE)])
    async with ReplayEngine({"m": script}) as engine:
        reader = Person.with_pauses(10.0, [(0.05, 0.5)])
        stopped = await drive(client(engine, pauses="stop"), [ask(person=reader)], horizon_s=10)
        silent = await drive(client(engine, pauses="silent"), [ask(person=reader)], horizon_s=10)
    first, second = stopped.logs[0].token_s
    assert second - first >= 0.49
    first, second = silent.logs[0].token_s
    assert second - first < 0.45


async def test_meter_sees_a_blocked_loop() -> None:
    """The negative control of the refusal: work on the loop shows as lag, and figures are objected to."""
    async with OverheadMeter() as meter:
        for _ in range(5):
            await asyncio.sleep(0.02)
            time.sleep(0.1)  # noqa: ASYNC251 - what a driver must not do
        busy = meter.overhead([])
    assert busy.lag_p99_ms > 50
    assert busy.objection(max_lag_ms=20) is not None


def test_no_objection_to_a_driver_in_time() -> None:
    calm = Overhead(lag_p50_ms=0.1, lag_p99_ms=5, lag_max_ms=80, cpu_share=0.3, late_p99_ms=4)
    assert calm.objection(max_lag_ms=20) is None
    assert calm.objection(max_lag_ms=4) is not None
    unknown = replace(calm, lag_p99_ms=math.nan)
    assert "too short" in (unknown.objection(max_lag_ms=20) or "")


async def test_the_gateway_believes_the_reports() -> None:
    """Through the real gateway: every report is accepted, and it learns the rate from them."""
    gate = asyncio.Event()
    script = Script(steps=[Send(ROLE), *(Send(token()) for _ in range(40)), Hold(gate), Send(DONE)])
    models = Script(steps=[Send(b'{"object":"list","data":[{"id":"m","object":"model"}]}')])
    async with (
        ReplayEngine({"m": script, "/v1/models": models}) as engine,
        running_gateway({"url": engine.base_url, "link": "off"}) as gateway,
    ):
        await eventually(gateway.app.registry.ready, "the engine is healthy")
        told = Client(url=gateway.base_url, model="m", declares_rate=False, report_every_s=0.1)
        running = asyncio.create_task(drive(told, [ask(person=Person(20.0))], horizon_s=10))
        accepted = {"outcome": "accepted"}
        name = "tokenflow_progress_requests_total"
        await eventually(lambda: gateway.metric(name, **accepted) >= 5, "five reports are taken")
        (stream,) = gateway.streams
        estimate = stream.reader.estimate(time.monotonic())
        gate.set()
        run = await running
        await gateway.everything_released()
    assert set(run.report_statuses) == {200}
    assert estimate.source == "progress"
    assert estimate.rate == pytest.approx(20.0, rel=0.3)
    assert run.logs[0].is_whole
