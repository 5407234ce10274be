"""The bench of gateways on itself: the driver's two ends joined with nothing in between, and its page."""

from __future__ import annotations

from tokenflow_bench.gateway import report
from tokenflow_bench.gateway.driver import Client, Driver
from tokenflow_bench.gateway.scenarios import Scale, first_token, saturated
from tokenflow_bench.gateway.targets import Target


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


def document(**results: float) -> dict[str, object]:
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
