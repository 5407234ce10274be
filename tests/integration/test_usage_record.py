"""What every stream has used is on record, whatever became of it, and nobody waits for the disk."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.keys import make_key
from support.replay_engine import Pause, ReplayEngine, Script
from support.transcripts import load
from tokenflow_engine.protocol import StreamState
from tokenflow_gateway.store.usage import USAGE_FILE
from tokenflow_gateway.tenants.commands import usage

CHAT = "/v1/chat/completions"


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.sglang("chat_stream", "chat_stream_usage", "chat_plain")
    scripts["endless"] = scenarios.endless(load("chat_stream"))
    scripts["slow"] = Script(steps=[Pause(0.02), *scripts["chat_stream"].steps])
    scripts["broken"] = scenarios.ends_without_done(load("chat_stream"), after_reads=4)
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path) as gateway:
        yield gateway


def asks(model: str = "chat_stream", **fields: object) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}


def rows(state: Path) -> list[dict[str, Any]]:
    if not (state / USAGE_FILE).exists():
        return []
    connection = sqlite3.connect(state / USAGE_FILE)
    connection.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in connection.execute("SELECT * FROM streams ORDER BY at")]
    except sqlite3.OperationalError:
        return []  # the table is being made
    finally:
        connection.close()


async def recorded(state: Path, count: int = 1) -> list[dict[str, Any]]:
    await eventually(lambda: len(rows(state)) >= count, f"{count} records")
    return rows(state)


async def test_a_finished_stream(gateway: RunningGateway, engine: ReplayEngine, tmp_path: Path) -> None:
    made = make_key(tmp_path, "acme")
    await eventually(lambda: gateway.app.keys.keyring.in_use, "the key is known")
    headers = {"authorization": f"Bearer {made.text}", "x-request-id": "mine"}
    answer = await gateway.client.post(CHAT, json=asks("chat_stream_usage"), headers=headers)
    (row,) = await recorded(tmp_path)
    rid = answer.headers["x-tokenflow-stream"].partition(".")[0]
    assert (row["rid"], row["request_id"], row["tenant"], row["key_id"]) == (rid, "mine", "acme", made.key.id)
    assert (row["sla"], row["route"], row["model"]) == ("default", CHAT, "chat_stream_usage")
    assert (row["engine"], row["end"]) == ("e", "finished")
    assert row["generated"] == row["delivered"] > 0
    assert row["prompt"] > 0
    assert 0 < row["ttft_s"] <= row["duration_s"]
    assert (row["parked_s"], row["stalls"]) == (0, 0)


@pytest.mark.parametrize(
    ("model", "stream", "end"),
    [("chat_plain", False, "finished"), ("broken", True, "truncated"), ("nothing", True, "refused")],
)
async def test_others_too(
    gateway: RunningGateway, tmp_path: Path, model: str, end: str, *, stream: bool
) -> None:
    await gateway.client.post(CHAT, json=asks(model, stream=stream))
    (row,) = await recorded(tmp_path)
    assert row["end"] == end
    assert (row["generated"] > 0) == (end != "refused")


async def test_an_aborted_stream_with_what_it_had(gateway: RunningGateway, tmp_path: Path) -> None:
    """Parked for a while before, as the plugin says."""
    async with gateway.client.stream("POST", CHAT, json=asks("endless")) as answer:
        async for _ in answer.aiter_bytes():
            break
        (stream,) = gateway.streams
        stream.note_state(StreamState(rid=stream.rid, state="parked", generated=40), stream.started + 1)
        stream.note_state(
            StreamState(rid=stream.rid, state="waiting", generated=40, offloaded=True), stream.started + 2
        )
        stream.note_state(StreamState(rid=stream.rid, state="running", generated=50), stream.started + 4)
    (row,) = await recorded(tmp_path)
    assert row["end"] == "client_gone"
    assert row["generated"] >= 50
    assert row["parked_s"] == 3


async def test_what_is_read_after_the_end_is_added(gateway: RunningGateway, tmp_path: Path) -> None:
    answer = await gateway.client.post(CHAT, json=asks())
    (row,) = await recorded(tmp_path)
    rid, _, capability = answer.headers["x-tokenflow-stream"].partition(".")
    report = {"reports": [{"seq": 1, "tokens": row["delivered"]}], "capability": capability}
    assert (await gateway.client.post(f"/v1/streams/{rid}/progress", json=report)).status_code == 200
    gateway.app.readers.expire(float("inf"))
    await eventually(lambda: rows(tmp_path)[0]["consumed"] == row["delivered"], "all of it is read")
    assert row["consumed"] < row["delivered"], "the test shows nothing"


async def test_streams_that_the_shutdown_ends_are_recorded(engine: ReplayEngine, tmp_path: Path) -> None:
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path, shutdown_grace_s=0) as gateway:
        client = httpx.AsyncClient(base_url=gateway.base_url, trust_env=False)
        async with client, client.stream("POST", CHAT, json=asks("endless")) as answer:
            chunks = answer.aiter_bytes()
            assert await anext(chunks)
            gateway.server.should_exit = True
            async for _ in chunks:
                pass
    (row,) = rows(tmp_path)
    assert row["end"] == "shutdown"
    assert row["generated"] > 0


async def test_a_disk_that_stands_still_holds_nobody_up(gateway: RunningGateway, tmp_path: Path) -> None:
    """While another writer has the file, answers come as ever; the records come after."""
    await gateway.client.post(CHAT, json=asks())
    await recorded(tmp_path)
    other = sqlite3.connect(tmp_path / USAGE_FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        async with asyncio.timeout(2):
            for _ in range(5):
                assert (await gateway.client.post(CHAT, json=asks())).status_code == 200
        assert len(rows(tmp_path)) == 1
        other.execute("ROLLBACK")
    finally:
        other.close()
    await recorded(tmp_path, 6)
    assert gateway.metric("tokenflow_usage_dropped_total") == 0


async def test_metrics_by_class_and_by_a_bounded_number_of_tenants(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    keys = {name: make_key(tmp_path, name) for name in ("first", "second", "third", "acme")}
    settings = {
        "state_dir": tmp_path,
        "metric_tenants": 2,
        "classes": {"gold": {"ttft_ms": 60_000}, "rush": {"ttft_ms": 1}},
        "tenants": {"acme": {"classes": ["gold", "rush"]}},
    }
    async with running_gateway(entry, **settings) as gateway:

        async def ask(name: str, **headers: str) -> int:
            bearer = {"authorization": f"Bearer {keys[name].text}"}
            answer = await gateway.client.post(CHAT, json=asks("slow"), headers={**bearer, **headers})
            return answer.status_code

        for name in keys:
            assert await ask(name) == 200
        assert await ask("acme", **{"x-tokenflow-sla": "rush"}) == 200
        await gateway.everything_released()
        ended = {
            name: gateway.metric("tokenflow_tenant_streams_ended_total", tenant=name, reason="finished")
            for name in (*keys, "other")
        }
        assert ended == {"acme": 2, "first": 1, "second": 0, "third": 0, "other": 2}
        assert gateway.metric("tokenflow_class_streams_ended_total", sla="default", reason="finished") == 3
        assert gateway.metric("tokenflow_class_time_to_first_token_seconds_count", sla="gold") == 1
        late = {
            sla: gateway.metric("tokenflow_class_first_token_late_total", sla=sla) for sla in ("gold", "rush")
        }
        assert late == {"gold": 0, "rush": 1}
        one = gateway.metric("tokenflow_class_tokens_total", sla="gold", kind="generated")
        assert one > 0
        assert gateway.metric("tokenflow_tenant_tokens_total", tenant="other", kind="generated") == 2 * one


async def test_without_recording_there_is_no_file(engine: ReplayEngine, tmp_path: Path) -> None:
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path, usage={"record": False}) as gateway:
        assert (await gateway.client.post(CHAT, json=asks())).status_code == 200
    assert not (tmp_path / USAGE_FILE).exists()


async def test_the_command_shows_it(
    gateway: RunningGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        await gateway.client.post(CHAT, json=asks())
    found = await recorded(tmp_path, 2)
    monkeypatch.setenv("TOKENFLOW_STATE_DIR", str(tmp_path))
    shown = await asyncio.to_thread(
        CliRunner().invoke, usage, ["--by", "tenant", "--by", "day", "--format", "json"]
    )
    (total,) = json.loads(shown.stdout)
    assert total["tenant"] == "anonymous"
    assert (total["streams"], total["finished"]) == (2, 2)
    assert total["generated"] == sum(row["generated"] for row in found)
