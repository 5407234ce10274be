"""Keys, tenants and classes of service at a running gateway: who gets in, and what they get there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from support import scenarios
from support.gateway import eventually, running_gateway
from support.keys import make_key, revoke_key
from support.plugin_stand_in import PluginStandIn
from support.replay_engine import ReplayEngine, Script, SeenRequest, Send
from support.served_logs import logging_as_served
from support.tenants import CHAT, asks, bearer, last_post, post, serving, until_answered
from support.transcripts import load
from tokenflow_engine.protocol import StreamOpened
from tokenflow_gateway.tenants.keys import NewKey


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.sglang("chat_stream", "chat_plain")
    scripts["embed"] = Script(headers={"content-type": "application/json"}, steps=[Send(b"{}")])
    scripts["endless"] = scenarios.endless(load("chat_stream"))
    async with ReplayEngine(scripts) as engine:
        yield engine


# ---- who gets in ------------------------------------------------------------------------------------


async def test_with_tenants_a_valid_key_is_needed(engine: ReplayEngine, tmp_path: Path) -> None:
    made = make_key(tmp_path)
    async with serving(engine, tmp_path) as gateway:
        refused = await post(gateway)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert "Authorization: Bearer tf-" in error["message"]
        other = make_key(tmp_path / "elsewhere")
        for headers in (bearer("any"), bearer(other), {"authorization": f"Basic {made.text}"}):
            assert (await post(gateway, headers)).status_code == 401
        assert not [seen for seen in engine.requests if seen.method == "POST"]
        assert (await post(gateway, bearer(made))).status_code == 200
        assert (await post(gateway, {"x-api-key": made.text})).status_code == 200
        assert (await post(gateway, {"authorization": f"bearer  {made.text}"})).status_code == 200


async def test_a_key_ends_on_connections_that_are_kept(engine: ReplayEngine, tmp_path: Path) -> None:
    """Nothing tells of its expiry but the clock."""
    ends_at = time.time() + 3.0
    made = make_key(tmp_path, expires_at=ends_at)
    async with serving(engine, tmp_path) as gateway:
        assert [(await post(gateway, bearer(made))).status_code for _ in range(3)] == [200] * 3
        await until_answered(gateway, made, 401)
        assert time.time() >= ends_at


async def test_the_refusal_has_the_dialects_shape(engine: ReplayEngine, tmp_path: Path) -> None:
    async with serving(engine, tmp_path) as gateway:
        refused = await post(gateway, path="/v1/messages")
        assert refused.status_code == 401
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "authentication_error"


async def test_real_clients_bring_their_keys_as_they_do(engine: ReplayEngine, tmp_path: Path) -> None:
    made = make_key(tmp_path)
    async with serving(engine, tmp_path) as gateway:
        base = gateway.base_url
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=made.text, max_retries=0) as client:
            answer = await client.chat.completions.create(
                model="chat_plain", messages=[{"role": "user", "content": "hi"}]
            )
            assert answer.choices
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with anthropic.AsyncAnthropic(base_url=base, api_key="any", max_retries=0) as strange:
            with pytest.raises(anthropic.AuthenticationError, match="needs an API key"):
                await strange.messages.create(
                    model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
                )


async def test_two_different_keys_are_refused(engine: ReplayEngine, tmp_path: Path) -> None:
    """Which of them counts would be a matter of luck."""
    one, other = make_key(tmp_path, "acme"), make_key(tmp_path, "low")
    async with serving(engine, tmp_path) as gateway:
        both = {**bearer(one), "x-api-key": other.text}
        assert (await post(gateway, both)).status_code == 401
        assert (await post(gateway, {**bearer(one), "x-api-key": one.text})).status_code == 200
        assert (await post(gateway, {**bearer("other-tool"), "x-api-key": one.text})).status_code == 200


async def test_without_a_body_read_for_strangers(engine: ReplayEngine, tmp_path: Path) -> None:
    """Who has no key is told so before the rest of a large request has come."""
    async with serving(engine, tmp_path) as gateway:
        host, port = gateway.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 30000000\r\n\r\n{{".encode())
        async with asyncio.timeout(5):
            assert b" 401 " in await reader.readline()
        writer.close()


async def test_anonymous_as_long_as_there_is_neither_key_nor_tenant(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    """On loopback. The first key ends it, and the end of the last key does not bring it back."""
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path) as gateway:
        assert (await post(gateway, bearer("any"))).status_code == 200
        assert "x-tokenflow-sla" not in (await post(gateway)).headers
        made = make_key(tmp_path)
        await until_answered(gateway, None, 401)
        assert (await post(gateway, bearer(made))).status_code == 200
        revoke_key(tmp_path, made)
        await until_answered(gateway, made, 401)
        assert (await post(gateway)).status_code == 401


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"host": "0.0.0.0"}, 401),
        ({"host": "0.0.0.0", "anonymous": "allow"}, 200),
        ({"anonymous": "deny"}, 401),
        ({"tenants": {"acme": {}}}, 401),
        ({"tenants": {"acme": {}}, "anonymous": "allow"}, 200),
        ({"tenants": {"anonymous": {}}}, 200),
    ],
)
async def test_when_requests_may_come_without_a_key(
    engine: ReplayEngine, tmp_path: Path, settings: dict[str, Any], status: int
) -> None:
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path, **settings) as gateway:
        assert (await post(gateway)).status_code == status
        assert (await gateway.client.get("/v1/models")).status_code == status
        assert (await gateway.client.get("/health/live")).status_code == 200


async def test_a_wrong_key_is_no_anonymous_request(engine: ReplayEngine, tmp_path: Path) -> None:
    make_key(tmp_path)
    stranger = make_key(tmp_path / "elsewhere")
    async with serving(engine, tmp_path, anonymous="allow") as gateway:
        assert (await post(gateway)).status_code == 200
        assert (await post(gateway, bearer(stranger))).status_code == 401


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
async def test_half_a_key_is_a_mistake_and_no_anonymous_request(
    engine: ReplayEngine, tmp_path: Path, header: str
) -> None:
    """It would go to the engine as a credential that is not ours."""
    made = make_key(tmp_path)
    async with serving(engine, tmp_path, anonymous="allow") as gateway:
        for half in (made.text[:-1], made.text + "x", "tf-", f"tf-{made.key.id}"):
            refused = await post(gateway, {header: f"Bearer {half}" if header == "authorization" else half})
            assert refused.status_code == 401
            assert "not all of one" in refused.json()["error"]["message"]
        assert not [seen for seen in engine.requests if seen.method == "POST"]
        assert (await post(gateway, {header: "Bearer sk-of-the-engine"})).status_code == 200


async def test_a_key_is_refused_by_a_gateway_that_has_none(engine: ReplayEngine, tmp_path: Path) -> None:
    """It was made for another state_dir: who goes on without would think that keys are in force."""
    elsewhere = make_key(tmp_path / "elsewhere")
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path) as gateway:
        refused = await post(gateway, bearer(elsewhere))
        assert refused.status_code == 401
        assert "knows no API keys" in refused.json()["error"]["message"]
        assert (await post(gateway)).status_code == 200


async def test_a_key_in_the_url_goes_nowhere(engine: ReplayEngine, tmp_path: Path) -> None:
    made = make_key(tmp_path)
    async with serving(engine, tmp_path, anonymous="allow") as gateway:
        refused = await post(gateway, path=f"{CHAT}?api_key={made.text}")
        assert refused.status_code == 401
        assert not [seen for seen in engine.requests if seen.method == "POST"]
        assert (await post(gateway, path=f"{CHAT}?api_key=other")).status_code == 200


async def test_a_revocation_is_noticed_within_two_seconds(engine: ReplayEngine, tmp_path: Path) -> None:
    """So is a new key; a stream that runs ends by itself."""
    made, kept = make_key(tmp_path), make_key(tmp_path)
    async with serving(engine, tmp_path) as gateway:
        async with gateway.client.stream("POST", CHAT, json=asks("endless"), headers=bearer(kept)) as running:
            assert (await post(gateway, bearer(made))).status_code == 200
            revoke_key(tmp_path, made)
            assert await until_answered(gateway, made, 401) < 2
            revoke_key(tmp_path, kept)
            assert await until_answered(gateway, kept, 401) < 2
            async for chunk in running.aiter_bytes():
                assert chunk
                break
        fresh = make_key(tmp_path)
        assert await until_answered(gateway, fresh, 200) < 2


async def test_no_request_reads_the_store(engine: ReplayEngine, tmp_path: Path) -> None:
    """Keys that are known go on when the file is gone, which is said once."""
    made = make_key(tmp_path)
    async with serving(engine, tmp_path) as gateway:
        await until_answered(gateway, make_key(tmp_path), 200)  # the store is being watched
        (tmp_path / "keys.sqlite3").unlink()
        await eventually(lambda: gateway.app.keys.failing, "the store was looked at")
        assert (await post(gateway, bearer(made))).status_code == 200
        assert (await post(gateway)).status_code == 401


# ---- what nobody else gets to see -------------------------------------------------------------------


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
@pytest.mark.parametrize(("path", "model"), [(CHAT, "chat_stream"), ("/v1/embeddings", "embed")])
async def test_no_key_reaches_an_engine(
    engine: ReplayEngine, tmp_path: Path, header: str, path: str, model: str
) -> None:
    made = make_key(tmp_path)
    sent = {header: f"Bearer {made.text}" if header == "authorization" else made.text}
    both = {**sent, "authorization": sent.get("authorization", "Bearer other"), "x-forwarded-key": made.text}
    async with serving(engine, tmp_path) as gateway:
        answer = await gateway.client.post(path, json=asks(model), headers=both)
        assert answer.status_code == 200
        seen = last_post(engine)
        assert not {"authorization", "x-api-key", "api-key"} & seen.headers.keys()
        assert made.key.secret not in str(seen.headers)
        assert made.key.secret.encode() not in seen.body


async def test_without_keys_a_clients_credentials_pass_as_before(
    engine: ReplayEngine, tmp_path: Path
) -> None:
    """The negative control of the test above."""
    entry = {"url": engine.base_url, "id": "e", "link": "off"}
    async with running_gateway(entry, state_dir=tmp_path) as gateway:
        await post(gateway, bearer("for-the-engine"))
        assert last_post(engine).headers["authorization"] == "Bearer for-the-engine"


async def test_a_key_is_in_no_log(
    engine: ReplayEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made, admin = make_key(tmp_path), make_key(tmp_path, kind="admin")
    with logging_as_served("debug"):
        async with serving(engine, tmp_path) as gateway:
            await post(gateway, bearer(made))
            await post(gateway, {"x-api-key": made.text}, model="no-such-model")
            await post(gateway, bearer(made), path="/v1/nowhere")
            await post(gateway, bearer(f"{made.text}x"))
            await gateway.client.get("/admin/streams", headers=bearer(admin))
            await gateway.client.get("/admin/streams", headers=bearer(made))
            revoke_key(tmp_path, made)
            await until_answered(gateway, made, 401)
    logged = "".join(capfd.readouterr())
    assert "stream ended" in logged
    assert made.key.id in logged, "which key it was is no secret"
    assert made.key.secret not in logged
    assert admin.key.secret not in logged


# ---- the gateway's own routes -----------------------------------------------------------------------

CLOSED = ("/admin/engines", "/admin/streams", "/metrics")


async def test_operators_routes_need_an_operators_key(engine: ReplayEngine, tmp_path: Path) -> None:
    client, admin = make_key(tmp_path), make_key(tmp_path, kind="admin")
    monitor = make_key(tmp_path, kind="monitor")
    async with serving(engine, tmp_path) as gateway:

        async def status(path: str, made: NewKey | None) -> int:
            headers = None if made is None else bearer(made)
            return (await gateway.client.get(path, headers=headers)).status_code

        for path in CLOSED:
            assert await status(path, None) == 401
            assert await status(path, client) == 403
            assert await status(path, admin) == 200
        assert await status("/metrics", monitor) == 200
        assert await status("/admin/streams", monitor) == 403
        for path in ("/health/live", "/health/ready", "/dashboard"):
            assert await status(path, None) == 200
        policy = await gateway.client.post("/admin/engines/e/policy", json={"policy": "fcfs"})
        assert policy.status_code == 401
        for made in (admin, monitor):
            refused = await post(gateway, bearer(made))
            assert refused.status_code == 403
            assert refused.json()["error"]["type"] == "permission_error"


async def test_the_admin_token_opens_the_same_doors(engine: ReplayEngine, tmp_path: Path) -> None:
    make_key(tmp_path)
    async with serving(engine, tmp_path, admin_token="hush") as gateway:
        for path in CLOSED:
            assert (await gateway.client.get(path, headers=bearer("hush"))).status_code == 200
            assert (await gateway.client.get(path, headers=bearer("hust"))).status_code == 401
        assert (await post(gateway, bearer("hush"))).status_code == 401


async def test_a_streams_reports_need_its_own_capability(engine: ReplayEngine, tmp_path: Path) -> None:
    """Neither a key of the same tenant, nor another stream's capability, nor an admin's key will do."""
    mine, theirs = make_key(tmp_path, "acme"), make_key(tmp_path, "low")
    admin = make_key(tmp_path, kind="admin")
    report = {"reports": [{"seq": 1, "tokens": 1}]}
    async with serving(engine, tmp_path) as gateway:
        async with (
            gateway.client.stream("POST", CHAT, json=asks("endless"), headers=bearer(mine)) as ours,
            gateway.client.stream("POST", CHAT, json=asks("endless"), headers=bearer(theirs)) as other,
        ):
            rid, _, capability = ours.headers["x-tokenflow-stream"].partition(".")
            _, _, foreign = other.headers["x-tokenflow-stream"].partition(".")
            path = f"/v1/streams/{rid}/progress"
            for forged in (theirs, mine, admin, foreign, "nothing"):
                refused = await gateway.client.post(path, json=report, headers=bearer(forged))
                assert refused.status_code == 403
            assert (
                await gateway.client.post(path, json=report, headers=bearer(capability))
            ).status_code == 200
        await gateway.everything_released()


async def test_models_and_engines_of_others_are_not_there(engine: ReplayEngine, tmp_path: Path) -> None:
    scripts = {**engine.scripts, "hidden": engine.scripts["chat_stream"]}
    listed = Script(
        headers={"content-type": "application/json"},
        steps=[Send(b'{"object":"list","data":[{"id":"hidden","object":"model"}]}')],
    )
    scripts["/v1/models"] = listed
    inside, outside = make_key(tmp_path, "inside"), make_key(tmp_path, "outside")
    async with ReplayEngine(scripts) as second:
        entries = [
            {"url": engine.base_url, "id": "e1", "link": "off"},
            {"url": second.base_url, "id": "e2", "link": "off"},
        ]
        tenants = {"inside": {}, "outside": {"engines": ["e1"]}}
        async with running_gateway(*entries, state_dir=tmp_path, tenants=tenants) as gateway:

            async def models(made: NewKey) -> list[str]:
                answer = await gateway.client.get("/v1/models", headers=bearer(made))
                return [entry["id"] for entry in answer.json()["data"]]

            assert "hidden" in await models(inside)
            assert "hidden" not in await models(outside)
            one = "/v1/models/hidden"
            assert (await gateway.client.get(one, headers=bearer(inside))).status_code == 200
            assert (await gateway.client.get(one, headers=bearer(outside))).status_code == 404
            assert (await post(gateway, bearer(inside), model="hidden")).status_code == 200
            before = len(second.requests)
            refused = await post(gateway, bearer(outside), model="hidden")
            assert len(second.requests) == before
            assert refused.status_code in {200, 404}  # one model is left, which then takes any name
            embedded = await post(gateway, bearer(outside), path="/v1/embeddings", model="hidden")
            assert len(second.requests) == before, embedded.text


# ---- what a request gets ----------------------------------------------------------------------------

GREEDY = {
    "x-tokenflow-sla": "gold",
    "x-tokenflow-ttft-ms": "1",
    "x-tokenflow-rate": "1000",
    "x-smg-priority": "system",
    "x-dynamo-request-priority": "100",
    "x-llm-d-slo-ttft-ms": "1",
    "x-llm-d-slo-tpot-ms": "1",
    "x-llm-d-inference-fairness-id": "acme",
    "x-openwebui-user-role": "admin",
}


async def announced(
    engine: ReplayEngine, state: Path, tenant: str, headers: dict[str, str], **fields: object
) -> tuple[StreamOpened, httpx.Response, SeenRequest]:
    """What the plugin, the client and the engine are told of one request."""
    made = make_key(state, tenant)
    async with serving(engine, state, link=None) as gateway:
        with PluginStandIn(engine.base_url) as plugin:
            (one,) = gateway.app.registry
            await eventually(lambda: one.linked, "linked")
            answer = await post(gateway, {**bearer(made), **headers}, **fields)
            await eventually(lambda: bool(plugin.announced), "announced")
            await gateway.everything_released()
            return next(iter(plugin.announced.values())), answer, last_post(engine)


async def test_the_grant_reaches_the_plugin(engine: ReplayEngine, tmp_path: Path) -> None:
    opened, answer, seen = await announced(engine, tmp_path, "acme", {"x-tokenflow-sla": "gold"})
    assert (opened.tenant, opened.sla, opened.weight) == ("acme", "gold", 8)
    assert (opened.ttft_s, opened.may_park, opened.declared_rate) == (0.5, False, None)
    assert opened.lead_cap_s == 20
    assert answer.headers["x-tokenflow-sla"] == "gold"
    assert "x-tokenflow-reduced" not in answer.headers
    assert seen.json()["priority"] == 10


async def test_forged_headers_get_bronze_nothing(engine: ReplayEngine, tmp_path: Path) -> None:
    opened, answer, seen = await announced(engine, tmp_path, "low", GREEDY, priority=99)
    assert (opened.tenant, opened.sla, opened.weight) == ("low", "bronze", 1)
    assert (opened.ttft_s, opened.may_park, opened.declared_rate) == (4.0, True, 10)
    assert answer.headers["x-tokenflow-sla"] == "bronze"
    assert answer.headers["x-tokenflow-reduced"] == "sla, ttft, rate, priority"
    assert "priority" not in seen.json()
    assert not GREEDY.keys() & seen.headers.keys()


async def test_the_bodys_priority_passes_no_route(engine: ReplayEngine, tmp_path: Path) -> None:
    """However it is spelled, and where the body is not read otherwise too."""
    made = make_key(tmp_path, "low")
    async with serving(engine, tmp_path) as gateway:
        routes = {CHAT: "chat_stream", "/v1/embeddings": "embed", "/v1/messages": "chat_stream"}
        for path, model in routes.items():
            body = f'{{"model": "{model}", "stream": true, "pri\\u006frity": 5, "priority": 987654}}'
            await gateway.client.post(path, content=body, headers=bearer(made))
            assert b"987654" not in last_post(engine).body
            assert "priority" not in last_post(engine).json()
            assert last_post(engine).json()["model"] == model
        body = b'--x\r\ncontent-disposition: form-data; name="priority"\r\n\r\n5\r\n--x--\r\n'
        await gateway.client.post("/v1/audio/transcriptions", content=body, headers=bearer(made))
        assert last_post(engine).body == body


async def test_an_unknown_class_is_refused_by_its_alternatives(engine: ReplayEngine, tmp_path: Path) -> None:
    made = make_key(tmp_path, "low")
    async with serving(engine, tmp_path) as gateway:
        refused = await post(gateway, {**bearer(made), "x-tokenflow-sla": "platinum"})
        assert refused.status_code == 400
        assert "may be one of bronze" in refused.json()["error"]["message"]


# ---- whom a front end asks for ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proxies", "trusted"), [([], False), (["127.0.0.0/8"], True), (["10.0.0.0/8", "::1/128"], False)]
)
async def test_a_front_ends_word_on_its_user_counts_from_configured_proxies_only(
    engine: ReplayEngine, tmp_path: Path, proxies: list[str], *, trusted: bool
) -> None:
    made = make_key(tmp_path)
    users = {"x-openwebui-user-id": "ann", "x-openwebui-user-email": "ann@example.com"}
    forged = {"x-forwarded-for": "10.0.0.7", "forwarded": "for=10.0.0.7"}
    async with serving(engine, tmp_path, trusted_proxies=proxies) as gateway:
        async with gateway.client.stream(
            "POST", CHAT, json=asks("endless"), headers={**bearer(made), **users, **forged}
        ):
            (stream,) = gateway.streams
            assert (stream.reader.name is not None) is trusted
        await gateway.everything_released()
        assert "ann" not in str(last_post(engine).headers)
