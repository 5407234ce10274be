"""The bench of gateways on itself: the driver's two ends joined with nothing in between, and its page."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from tokenflow_bench.gateway import events, report
from tokenflow_bench.gateway.driver import Client, Driver
from tokenflow_bench.gateway.scenarios import Scale, first_token, saturated
from tokenflow_bench.gateway.targets import TARGETS, Target, our_target
from tokenflow_gateway.config import load_settings
from tokenflow_gateway.relay.errors import Unauthorized
from tokenflow_gateway.tenants.keyring import Keyring, KeyWatch
from tokenflow_gateway.tenants.rules import Rules


def small() -> Scale:
    scale = Scale(quick=True)
    scale.window_s, scale.first_tokens = 0.2, 20
    return scale


def test_without_a_gateway_chunks_go_round_and_cost_it_nothing() -> None:
    with Driver() as driver:
        target = Target("no gateway", driver.port, -1)
        figures = saturated(driver, target, small()) | first_token(driver, target, small())
    assert figures["saturated_per_s"] > 100
    assert figures["saturated_us"] == 0
    assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"]


def test_a_client_that_does_not_read_stops_the_mock_engine_in_the_middle_of_a_chunk_and_nothing_is_lost() -> (
    None
):
    with Driver() as driver:
        client = Client(driver, driver.port, receive_buffer=4096)
        client.ask()
        assert driver.until(lambda: client.events > 0, within_s=5)
        client.deafen()
        assert client.engine is not None
        taken = 0
        while took := client.engine.send_some():
            taken += took
        assert taken > 4096
        driver.watch(client.sock, client.ready)
        before = client.events
        assert driver.until(lambda: client.events > before + 10, within_s=5)
        assert client.engine.send_some() > 0


def document(**results: float) -> dict[str, Any]:
    machine = {"cpu": "c", "cores": 2, "kernel": "k", "load_before": 0.1}
    return {
        "command": "make bench-gateway",
        "at": "now",
        "took_s": 60,
        "machine": machine,
        "versions": {"commit": "a", "python": "3", "uvloop": "1"},
        "missing": {"smg": "did not start"},
        "results": {
            name: {"saturated": [{"saturated_us": value, "saturated_per_s": 1.0}]}
            for name, value in results.items()
        },
    }


def test_goals_are_judged_by_the_peers_of_the_same_run() -> None:
    assert "2.00 x nginx | yes" in report.page(document(TokenFlow=20.0, nginx=10.0), "")
    assert "2.50 x nginx | no" in report.page(document(TokenFlow=25.0, nginx=10.0), "")
    assert "50.00 x | ambition" in report.page(document(TokenFlow=20.0, LiteLLM=1000.0), "")


def test_what_was_written_by_hand_stays_on_the_page() -> None:
    by_hand = "<!-- by hand -->\n## Why\n<!-- end -->\n"
    page = report.page(document(TokenFlow=20.0), f"# Old\n{by_hand}")
    assert by_hand in page
    assert "smg is missing" in page
    assert report.page(document(TokenFlow=20.0), page) == page


def test_the_gateway_under_measurement_asks_for_its_key_and_counts_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENFLOW_STATE_DIR")  # which would go before the file
    words, path = TARGETS["TokenFlow"]
    assert words is not None
    assert path == "/health/ready"
    config = words(tmp_path, 8080, "http://127.0.0.1:9")[-1].removeprefix("--config=")
    target = our_target("TokenFlow", 8080)
    settings = load_settings(Path(config))
    watch = KeyWatch(Keyring(), settings.state)
    watch.load()
    access = Rules(settings, watch.keyring).access
    principal = access.client([(b"authorization", f"Bearer {target.key}".encode())])
    assert None not in astuple(principal.tenant.limits)
    with pytest.raises(Unauthorized):
        access.client([(b"authorization", f"Bearer {events.KEY}".encode())])
    access.monitor([(b"authorization", f"Bearer {target.metrics_key}".encode())])


@pytest.mark.parametrize(("held_kb", "reached"), [(257.0, "ambition"), (273.0, "no")])
def test_what_waits_for_a_client_that_does_not_read_is_judged_by_the_cap(
    held_kb: float, reached: str
) -> None:
    results = document(TokenFlow=20.0)
    results["results"]["TokenFlow"]["stalled_client"] = [{"stalled_held_kb": held_kb}]
    assert f"{held_kb:.2f} kB | {reached}" in report.page(results, "")
