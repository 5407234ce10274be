"""Gateways that cannot serve a request now: when the proxy asks the other one, and when it does not."""

from __future__ import annotations

import json
from pathlib import Path

from support.topology import Part, needs_topology, topology
from support.topology_load import Load, Stream, metric

pytestmark = needs_topology

TOKENS_PER_S = 40.0
MAX_WAIT_S = 1.0
QUEUE = {"enabled": True, "engine_queue": 1, "max_wait_s": MAX_WAIT_S}
FULL = 2 * 2 * 2
"""Streams: of two gateways, each with two engines, of which each runs one stream and has one waiting."""


async def test_who_has_waited_in_vain_does_not_wait_once_more_at_the_other_gateway(tmp_path: Path) -> None:
    async with (
        topology(
            tmp_path, tokens_per_s=TOKENS_PER_S, settings={"admission": QUEUE}, entry={"max_running": 1}
        ) as running,
        running.proxy.client() as client,
    ):
        load = await Load.of(client, FULL, tokens=200)
        late = await Stream("late").read(client, tokens=1)
        assert (late.status, late.reason) == (504, "queue_timeout")
        assert late.ended is not None
        assert MAX_WAIT_S <= late.ended - late.sent < 2 * MAX_WAIT_S
        rejected = 'tokenflow_rejected_total{reason="queue_timeout"}'
        assert sum([await metric(gateway, rejected) for gateway in running.gateways]) == 1
        await load.end()
        assert len(load.whole) == FULL
    assert answers(running.proxy)["late"] == ["504"]


async def test_where_a_gateway_sees_no_engine_the_other_one_is_asked(tmp_path: Path) -> None:
    """It answers at once, so that nobody waits for it."""
    async with (
        topology(tmp_path, tokens_per_s=TOKENS_PER_S, shared=False) as running,
        running.proxy.client() as client,
    ):
        blind, _ = running.gateways
        async with blind.client() as direct:
            for engine in running.engines:
                path = f"/admin/engines/{engine.name}/draining"
                assert (await direct.post(path, json={"draining": True})).status_code == 200
            refused = await Stream().read(direct, tokens=1)
            assert (refused.status, refused.reason) == (503, "no_engine")
        streams = [await Stream(f"r-{number}").read(client, tokens=2) for number in range(8)]
        assert all(stream.whole for stream in streams)
        assert max(stream.first_s for stream in streams) < MAX_WAIT_S
    asked = answers(running.proxy)
    assert ["503", "200"] in [asked[stream.name] for stream in streams], "the blind one was asked, too"


def answers(proxy: Part) -> dict[str, list[str]]:
    """By the proxy's log: what the gateways answered to each request, one after the other."""
    lines = (proxy.folder / "access.log").read_text().splitlines()
    return {line["request_id"]: line["upstream_status"].split(", ") for line in map(json.loads, lines)}
