"""Progress reports over real sockets: from a client's report to the estimate, the views and the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import structlog

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import ReplayEngine
from support.transcripts import load
from tokenflow_gateway.readers import registry
from tokenflow_gateway.relay.stream import Stream

CHAT = "/v1/chat/completions"
STREAM = load("chat_stream_length")


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.recordings("models")
    scripts["/v1/models"] = scripts["models"]
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "id": "e", "link": "off"}) as gateway:
        yield gateway
        await gateway.everything_released()


@dataclass
class Open:
    """A stream that has delivered all but its end."""

    gateway: RunningGateway
    rid: str
    capability: str
    delivered: int

    async def send(self, *reports: dict[str, Any], **more: Any) -> httpx.Response:
        body = {"capability": self.capability, "reports": list(reports), **more}
        return await self.gateway.client.post(f"/v1/streams/{self.rid}/progress", json=body)

    async def view(self) -> dict[str, Any]:
        (shown,) = (await self.gateway.client.get("/admin/streams")).json()["streams"]
        assert isinstance(shown, dict)
        return shown


@asynccontextmanager
async def open_stream(
    gateway: RunningGateway, engine: ReplayEngine, *, user: str | None = None, **headers: str
) -> AsyncIterator[Open]:
    end = asyncio.Event()
    engine.scripts["held"] = scenarios.replay(STREAM, gates={len(STREAM.reads) - 1: end})
    body = {"model": "held", "stream": True, "messages": [], **({"user": user} if user else {})}
    async with gateway.client.stream("POST", CHAT, json=body, headers=headers) as answer:
        rid, _, capability = answer.headers["x-tokenflow-stream"].partition(".")
        reads = answer.aiter_raw()
        await anext(reads)
        (stream,) = gateway.streams
        settled = 0

        def all_but_the_end() -> bool:
            nonlocal settled
            settled, before = stream.reader.shape.tokens, settled
            return settled == before > 10

        reading = asyncio.create_task(_drain(reads))
        await eventually(all_but_the_end, "delivered")
        yield Open(gateway, rid, capability, settled)
        end.set()
        await reading


async def _drain(reads: AsyncIterator[bytes]) -> None:
    async for _ in reads:
        pass


async def test_a_report_moves_the_reader(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with open_stream(gateway, engine, **{"x-tokenflow-rate": "0.5"}) as stream:
        before = await stream.view()
        assert (before["source"], before["rate"], before["reader_state"]) == ("declared", 0.5, "reading")
        answer = await stream.send({"seq": 0, "tokens": 6, "paused": True})
        assert answer.status_code == 200
        assert answer.json() == {
            "accepted": 1,
            "consumed": 6.0,
            "delivered": stream.delivered,
            "state": "paused",
            "open": True,
        }
        shown = await stream.view()
        assert (shown["source"], shown["reader_state"], shown["consumed"]) == ("progress", "paused", 6.0)
        assert shown["buffered"] == shown["generated"] - 6.0
    assert gateway.metric("tokenflow_progress_requests_total", outcome="accepted") == 1
    assert gateway.metric("tokenflow_estimator_error_tokens_count") == 1


async def test_what_was_sent_twice_counts_once(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with open_stream(gateway, engine) as stream:
        assert (await stream.send({"seq": 3, "tokens": 2, "paused": True})).json()["accepted"] == 1
        assert (await stream.send({"seq": 3, "tokens": 9})).json()["accepted"] == 0
        assert (await stream.view())["reader_state"] == "paused"


async def test_a_position_beyond_what_was_delivered_is_all_of_it(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    async with open_stream(gateway, engine) as stream:
        answer = await stream.send({"seq": 0, "tokens": 1e6})
        assert answer.json()["consumed"] == stream.delivered


async def test_a_beacon_is_understood(gateway: RunningGateway, engine: ReplayEngine) -> None:
    """`navigator.sendBeacon` sends text/plain and no header of its own."""
    async with open_stream(gateway, engine) as stream:
        report = '{"seq": 0, "chars": 3, "visible": false}'
        body = f'{{"capability": "{stream.capability}", "reports": [{report}]}}'
        headers = {"content-type": "text/plain;charset=UTF-8", "origin": "https://chat.example"}
        url = f"/v1/streams/{stream.rid}/progress"
        answer = await gateway.client.post(url, content=body, headers=headers)
        assert answer.json()["state"] == "paused"
        assert answer.headers["access-control-allow-origin"] == "*"


async def test_the_capability_may_be_a_bearer_token(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with open_stream(gateway, engine) as stream:
        answer = await gateway.client.post(
            f"/v1/streams/{stream.rid}/progress",
            json={"reports": [{"seq": 0, "tokens": 1}]},
            headers={"authorization": f"Bearer {stream.capability}"},
        )
        assert answer.status_code == 200


@pytest.mark.parametrize("capability", ["", "forged", "x" * 5000])
async def test_a_wrong_capability_changes_nothing(
    gateway: RunningGateway, engine: ReplayEngine, capability: str
) -> None:
    async with open_stream(gateway, engine) as stream:
        answer = await stream.send({"seq": 0, "tokens": 1, "paused": True}, capability=capability)
        assert answer.status_code == 403
        assert (await stream.view())["source"] == "model"
    assert gateway.metric("tokenflow_progress_requests_total", outcome="refused_403") == 1


async def test_a_reader_reads_on_after_the_end(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with open_stream(gateway, engine, **{"x-tokenflow-rate": "0.5"}) as stream:
        pass
    await gateway.everything_released()
    answer = await stream.send({"seq": 0, "tokens": 5, "paused": True})
    assert answer.status_code == 200
    said = answer.json()
    assert (said["open"], said["consumed"], said["state"]) == (False, 5.0, "paused")
    assert (await stream.send({"seq": 1, "tokens": 9}, capability="forged")).status_code == 403
    assert gateway.metric("tokenflow_estimator_error_tokens_count") == 1


async def test_a_stream_that_ended_long_ago_is_404(
    gateway: RunningGateway, engine: ReplayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "GRACE_S", 0.0)
    async with open_stream(gateway, engine) as stream:
        pass
    await gateway.everything_released()
    assert (await stream.send({"seq": 0, "tokens": 1})).status_code == 404


SLOW_READING = (
    {"seq": 0, "age_ms": 30_000, "tokens": 0},
    {"seq": 1, "age_ms": 20_000, "tokens": 3},
    {"seq": 2, "age_ms": 10_000, "tokens": 6},
)
"""Reports of a reader at 0.3 tokens a second, over 20 s."""


def begun_a_minute_ago(stream: Stream) -> None:
    """Reports say nothing of a time before their stream."""
    stream.reader._estimator._latest -= 60.0


async def test_a_reader_who_comes_back_is_known(gateway: RunningGateway, engine: ReplayEngine) -> None:
    ann, bob = {"x-tokenflow-user": "ann"}, {"x-tokenflow-user": "bob"}
    async with open_stream(gateway, engine, **ann) as stream:
        before = await stream.view()
        assert before["source"] == "model"
        begun_a_minute_ago(*gateway.streams)
        await stream.send(*SLOW_READING)
    async with open_stream(gateway, engine, **ann) as stream:
        known = await stream.view()
        assert known["source"] == "learned"
        assert known["rate"] < before["rate"] / 2
        assert known["rate_high"] / known["rate_low"] < before["rate_high"] / before["rate_low"]
    async with open_stream(gateway, engine, **bob) as stream:
        assert (await stream.view())["source"] == "model"


async def test_what_is_reported_after_the_end_is_learned_from(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    async with open_stream(gateway, engine, user="ann") as stream:
        begun_a_minute_ago(*gateway.streams)
    await stream.send(*SLOW_READING)
    async with open_stream(gateway, engine, user="ann") as stream:
        assert (await stream.view())["source"] == "learned"


async def test_nobody_is_known_where_that_is_switched_off(engine: ReplayEngine) -> None:
    async with running_gateway({"url": engine.base_url, "link": "off"}, learn_rates=False) as gateway:
        for _ in range(2):
            async with open_stream(gateway, engine, user="ann") as stream:
                assert (await stream.view())["source"] == "model"
                begun_a_minute_ago(*gateway.streams)
                await stream.send(*SLOW_READING)


async def test_who_reads_is_not_logged(
    gateway: RunningGateway, engine: ReplayEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with structlog.testing.capture_logs() as logs:
        async with open_stream(gateway, engine, user="ann.in.clear") as stream:
            await stream.send(*SLOW_READING)
            view = await stream.view()
        await gateway.everything_released()
    assert logs
    assert "ann.in.clear" not in f"{logs}{view}{gateway.app.readers.__dict__}"


async def test_pauses_are_counted(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with open_stream(gateway, engine, **{"x-tokenflow-rate": "0.5"}) as stream:
        for seq, paused in enumerate([False, True, True, False, True]):
            await stream.send({"seq": seq, "tokens": 2, "paused": paused})
            (open_one,) = gateway.streams
            state = "paused" if paused else "reading"
            await eventually(lambda state=state, track=open_one.reader: track.tally.state == state, state)
        assert gateway.metric("tokenflow_reader_pauses_total", source="progress") == 2
        assert gateway.metric("tokenflow_reader_stalls_total", source="progress") == 0


async def test_waiting_for_more_text_is_counted(gateway: RunningGateway, engine: ReplayEngine) -> None:
    """The reader has read all, and the end of the answer is held back."""
    labels = {"source": "declared"}
    begun = time.monotonic()
    async with open_stream(gateway, engine, **{"x-tokenflow-rate": "1000"}):
        await eventually(
            lambda: gateway.metric("tokenflow_reader_stall_seconds_total", **labels) > 0.5, "half a second"
        )
        assert gateway.metric("tokenflow_reader_stalls_total", **labels) == 1
        assert gateway.metric("tokenflow_reader_stall_seconds_total", **labels) < time.monotonic() - begun
    await gateway.everything_released()
    consumed = gateway.metric("tokenflow_consumed_tokens_total", **labels)
    assert consumed == gateway.metric("tokenflow_delivered_tokens_total", engine="e")


async def test_waiting_for_the_first_token_is_no_stall(gateway: RunningGateway, engine: ReplayEngine) -> None:
    begin = asyncio.Event()
    engine.scripts["late"] = scenarios.replay(STREAM, gates={0: begin})
    body = {"model": "late", "stream": True, "messages": []}
    asked = asyncio.create_task(gateway.client.post(CHAT, json=body))
    await eventually(
        lambda: any(stream.reader.tally.at > stream.started + 0.2 for stream in gateway.streams), "a look"
    )
    begin.set()
    await asked
    assert gateway.metric("tokenflow_reader_stalls_total", source="model") == 0


async def test_bad_bodies_are_refused(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with open_stream(gateway, engine) as stream:
        assert (await stream.send({"seq": 0, "tokens": -1})).status_code == 400
        assert (await stream.send({"seq": 0, "tokens": 1}, pad="x" * 70_000)).status_code == 413
        got = await gateway.client.get(f"/v1/streams/{stream.rid}/progress")
        assert got.status_code == 405
        assert "error" in got.json()


async def test_a_flood_is_refused_and_others_are_not(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with open_stream(gateway, engine) as stream:
        answers = await asyncio.gather(*(stream.send({"seq": n, "tokens": 1}) for n in range(200)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert refused[0].headers["retry-after"] == "1"


async def test_what_nobody_can_have_read_is_counted(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with open_stream(gateway, engine) as stream:
        await stream.send({"seq": 0, "tokens": stream.delivered})
        assert gateway.metric("tokenflow_progress_clamped_total") == 0
        await stream.send({"seq": 1, "tokens": 1e6}, {"seq": 2, "chars": 10**6}, {"seq": 3, "tokens": 1})
        assert gateway.metric("tokenflow_progress_clamped_total") == 2


async def test_words_alone_teach_nothing_of_a_user(gateway: RunningGateway, engine: ReplayEngine) -> None:
    lies = [{"seq": n, "tokens": 0, "rate": 1000, "paused": True} for n in range(5)]
    for user in ("ann", "ann", " ", " "):
        async with open_stream(gateway, engine, user=user) as stream:
            assert (await stream.view())["source"] == "model"
            await stream.send(*lies)


async def test_a_blank_name_is_nobodys(gateway: RunningGateway, engine: ReplayEngine) -> None:
    for _ in range(2):
        async with open_stream(gateway, engine, user=" ", **{"x-tokenflow-user": ""}) as stream:
            (open_one,) = gateway.streams
            assert open_one.reader.name is None
            await stream.send({"seq": 0, "tokens": 1})


async def test_an_agent_that_waits_for_a_tool_has_paused(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    async with open_stream(gateway, engine, **{"x-tokenflow-reader": "machine"}) as stream:
        answer = await stream.send({"seq": 0, "tokens": 7, "paused": True})
        assert answer.json()["state"] == "paused"
        await stream.send({"seq": 1, "tokens": 9})
        shown = await stream.view()
        assert (shown["reader_state"], shown["source"]) == ("ahead", "progress")


# ---- clients that do not do what they should -----------------------------------------------------


@asynccontextmanager
async def half_sent(
    gateway: RunningGateway, path: str, *headers: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request with reports of which the last bytes do not come."""
    host, port = gateway.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "\r\n".join([f"POST {path} HTTP/1.1", "host: localhost", "content-length: 99", *headers])
    writer.write(f"{head}\r\n\r\n{{".encode())
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_reports_that_never_come_are_not_waited_for(engine: ReplayEngine) -> None:
    settings = {"timeouts": {"body_s": 0.2}}
    async with (
        running_gateway({"url": engine.base_url, "link": "off"}, **settings) as gateway,
        half_sent(gateway, "/v1/streams/tf-x/progress") as (reader, _),
        asyncio.timeout(5),
    ):
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert gateway.metric("tokenflow_progress_requests_total", outcome="refused_408") == 1


async def test_a_wrong_capability_in_the_header_is_refused_before_the_body(gateway: RunningGateway) -> None:
    forged = f"authorization: Bearer {'x' * 22}"
    async with half_sent(gateway, "/v1/streams/tf-x/progress", forged) as (reader, _), asyncio.timeout(5):
        assert (await reader.read()).startswith(b"HTTP/1.1 403 ")


async def test_a_header_that_is_meant_for_others_is_no_capability(
    gateway: RunningGateway, engine: ReplayEngine
) -> None:
    async with open_stream(gateway, engine) as stream:
        answer = await gateway.client.post(
            f"/v1/streams/{stream.rid}/progress",
            json={"capability": stream.capability, "reports": [{"seq": 0, "tokens": 1}]},
            headers={"authorization": "Bearer sk-a-key-of-the-engine's"},
        )
        assert answer.status_code == 200


async def test_a_client_that_leaves_in_the_middle_is_counted_and_no_fault(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with half_sent(gateway, "/v1/streams/tf-x/progress"):
        pass
    await eventually(
        lambda: gateway.metric("tokenflow_progress_requests_total", outcome="client_gone") == 1, "counted"
    )
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_the_preflight_of_a_browser_is_answered(gateway: RunningGateway) -> None:
    answer = await gateway.client.options(
        "/v1/streams/tf-x/progress", headers={"origin": "https://a.example"}
    )
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-tokenflow-rate", "fast"),
        ("x-tokenflow-rate", "-1"),
        ("x-tokenflow-rate", "nan"),
        ("x-tokenflow-rate", "1e9"),
        ("x-tokenflow-rate", "1_0"),
        ("x-tokenflow-rate", "0.01"),
        ("x-tokenflow-rate", "1e-320"),
        ("x-tokenflow-reader", "cat"),
    ],
)
async def test_a_header_that_means_nothing_is_400(gateway: RunningGateway, name: str, value: str) -> None:
    answer = await gateway.client.post(CHAT, json={"model": "m", "messages": []}, headers={name: value})
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"].lower()


async def test_our_headers_do_not_reach_the_engine(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with open_stream(gateway, engine, **{"x-tokenflow-reader": "voice"}) as stream:
        assert (await stream.view())["reader"] == "voice"
    (seen,) = [seen for seen in engine.requests if seen.path == CHAT]
    assert not any(name.startswith("x-tokenflow") for name in seen.headers)


async def test_a_machine_has_no_buffer(gateway: RunningGateway, engine: ReplayEngine) -> None:
    async with open_stream(gateway, engine, **{"x-tokenflow-reader": "machine"}) as stream:
        shown = await stream.view()
        assert (shown["reader_state"], shown["buffered"]) == ("ahead", 0.0)


async def test_pages_of_allowed_origins_may_call_the_api(engine: ReplayEngine) -> None:
    page = "https://chat.example"
    engine.scripts["m"] = scenarios.replay(STREAM)
    async with running_gateway({"url": engine.base_url, "link": "off"}, cors_origins=[page]) as gateway:
        preflight = await gateway.client.options(
            CHAT, headers={"origin": page, "access-control-request-method": "POST"}
        )
        assert preflight.headers["access-control-allow-origin"] == page
        answer = await gateway.client.post(
            CHAT, json={"model": "m", "stream": True, "messages": []}, headers={"origin": page}
        )
        assert answer.headers["access-control-allow-origin"] == page
        assert "x-tokenflow-stream" in answer.headers["access-control-expose-headers"].lower()
        other = await gateway.client.get("/v1/models", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
