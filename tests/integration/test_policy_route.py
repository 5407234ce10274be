"""The admin route that changes an engine's policy, against the engine's real end of the link."""

from __future__ import annotations

from functools import partial

import msgspec

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import ReplayEngine
from tokenflow_engine.control.endpoint import default_endpoint, link_secret
from tokenflow_engine.control.server import LinkServer
from tokenflow_engine.protocol import PROTOCOL_VERSION, Durations, EngineStats, SetPolicy, Welcome

WELCOME = Welcome(
    version=PROTOCOL_VERSION,
    engine_id="e-1",
    model="m",
    engine="sglang 0.5.23",
    capabilities=["policy"],
    kv_tokens=1000,
    max_running=8,
    policies=["adaptive", "fcfs"],
)
STATS = EngineStats(
    at=0.0,
    running=0,
    waiting=0,
    parked=1,
    kv_used_tokens=0,
    kv_tokens=1000,
    tokens_per_s=0.0,
    generated_total=0,
    offloaded=2,
    preemptions={"parked": 3},
    fixed={"HiSparse": 1},
    departures={"paused": 2, "ahead": 1},
    stalls={"ahead": 1},
    stall_s={"ahead": 0.25},
    synced_evictions={"1": 4},
    return_s={"loaded": Durations(bounds_s=[0.1, 1.0], counts=[4, 2, 1], sum_s=3.5)},
    plan_times=Durations(bounds_s=[0.001], counts=[9, 1], sum_s=0.008),
    write_bytes_per_s=2e9,
    load_bytes_per_s=1e9,
)


async def test_a_policy_is_passed_on_and_shown_once_it_is_in_force() -> None:
    scripts = scenarios.sglang()
    async with ReplayEngine(scripts) as engine, running_gateway(engine.base_url) as gateway:
        name = next(iter(gateway.app.registry)).name
        path = f"/admin/engines/{name}/policy"
        assert (await gateway.client.post(path, json={"policy": "adaptive"})).status_code == 409
        endpoint = default_endpoint(int(engine.base_url.rpartition(":")[2]))
        link = LinkServer(endpoint, secret=link_secret(), welcome=WELCOME, stats=STATS)
        link.start()
        try:
            engine_of_gateway = next(iter(gateway.app.registry))
            await eventually(lambda: engine_of_gateway.stats is not None, "the link is up")
            unknown = await gateway.client.post(path, json={"policy": "magic"})
            assert unknown.status_code == 400
            assert "adaptive, fcfs" in unknown.json()["error"]["message"]
            assert (await gateway.client.post("/admin/engines/x/policy", json={})).status_code == 400
            nowhere = await gateway.client.post("/admin/engines/x/policy", json={"policy": "fcfs"})
            assert nowhere.status_code == 404
            heard: list[object] = []

            def has_come(spelling: str) -> bool:
                heard.extend(delivery.message for delivery in link.receive(limit=10))
                return SetPolicy(policy=spelling) in heard

            half = b'{"policy": "adaptive:\\ud800"}'  # of a surrogate pair: no text
            as_json = {"content-type": "application/json"}
            assert (await gateway.client.post(path, content=half, headers=as_json)).status_code == 400
            for spelling in ("adaptive", "adaptive:offload=0"):
                taken = await gateway.client.post(path, json={"policy": spelling})
                assert (taken.status_code, taken.json()) == (202, {"policy": spelling})
                await eventually(partial(has_come, spelling), "the engine was told")
            link.stats = msgspec.structs.replace(STATS, policy="adaptive")
            await eventually(
                lambda: engine_of_gateway.stats is not None and engine_of_gateway.stats.policy == "adaptive",
                "the engine says so",
            )
            [shown] = (await gateway.client.get("/admin/engines")).json()["engines"]
            assert (shown["policy"], shown["offloaded"], shown["preemptions"]) == (
                "adaptive",
                2,
                {"parked": 3},
            )
            assert gateway.metric("tokenflow_engine_preemptions", engine=name, kind="parked") == 3.0
            assert gateway.metric("tokenflow_engine_offloaded", engine=name) == 2.0
            _preemption_is_exported(gateway, name)
            assert shown["fixed"] == "HiSparse"
            assert gateway.metric("tokenflow_engine_fixed", engine=name, reason="HiSparse") == 1.0
        finally:
            link.close()


def _preemption_is_exported(gateway: RunningGateway, engine: str) -> None:
    """What `STATS` says, in Prometheus' words; buckets are cumulative."""
    assert gateway.metric("tokenflow_engine_departures", engine=engine, reason="paused") == 2.0
    assert gateway.metric("tokenflow_engine_stalls", engine=engine, reason="ahead") == 1.0
    assert gateway.metric("tokenflow_engine_stall_s", engine=engine, reason="ahead") == 0.25
    assert gateway.metric("tokenflow_engine_synced_evictions", engine=engine, passes="1") == 4.0
    buckets = {
        end: gateway.metric("tokenflow_engine_return_seconds_bucket", engine=engine, kind="loaded", le=end)
        for end in ("0.1", "1.0", "+Inf")
    }
    assert buckets == {"0.1": 4.0, "1.0": 6.0, "+Inf": 7.0}
    assert gateway.metric("tokenflow_engine_return_seconds_sum", engine=engine, kind="loaded") == 3.5
    assert gateway.metric("tokenflow_engine_plan_seconds_bucket", engine=engine, le="0.001") == 9.0
    assert gateway.metric("tokenflow_engine_plan_seconds_count", engine=engine) == 10.0
    assert gateway.metric("tokenflow_engine_write_bytes_per_s", engine=engine) == 2e9
    assert gateway.metric("tokenflow_engine_load_bytes_per_s", engine=engine) == 1e9
