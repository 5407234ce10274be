"""What keeps the plugin from harming the engine, as far as that can be seen without one."""

from __future__ import annotations

import logging

import pytest

from tokenflow_engine.control.ratelimit import Occasionally
from tokenflow_engine.sglang import cpu_compat, plugin
from tokenflow_engine.sglang.guard import errors_caught, guarded


def test_an_error_in_a_hook_is_counted_and_becomes_none(caplog: pytest.LogCaptureFixture):
    @guarded("test-error")
    def hook(value: int) -> float:
        return 1 / value

    before = errors_caught()
    with caplog.at_level(logging.WARNING):
        assert hook(2) == 0.5
        assert errors_caught() == before
        assert [hook(0) for _ in range(3)] == [None] * 3
    assert errors_caught() == before + 3
    assert len(caplog.records) == 1  # not one a step
    assert "hook 'test-error'" in caplog.records[0].getMessage()
    assert "ZeroDivisionError" in caplog.text


def test_what_stops_the_process_is_not_caught():
    @guarded("test-exit")
    def hook() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        hook()


@pytest.mark.parametrize(("faults", "fails"), [("count", False), ("count,test-fault", True), ("all", True)])
def test_faults_are_injected_by_name(monkeypatch: pytest.MonkeyPatch, faults: str, fails: bool):
    monkeypatch.setenv("TOKENFLOW_FAULT", faults)
    assert guarded("test-fault")(lambda: "ran")() == (None if fails else "ran")


def test_failures_in_a_row_are_told_and_a_success_starts_afresh():
    told: list[tuple[str, int]] = []

    @guarded("test-row", on_failure=lambda name, in_a_row: told.append((name, in_a_row)))
    def hook(value: int) -> float:
        return 1 / value

    for value in (0, 0, 1, 0):
        hook(value)
    assert told == [("test-row", 1), ("test-row", 2), ("test-row", 1)]


def test_a_fault_may_strike_every_second_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOKENFLOW_FAULT", "other,test-half/2")
    hook = guarded("test-half")(lambda: "ran")
    assert [hook() for _ in range(4)] == [None, "ran", None, "ran"]


def test_repeated_lines_are_held_back_and_their_number_told(caplog: pytest.LogCaptureFixture):
    now = [0.0]
    log = Occasionally(every_s=10.0, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for second in (0.0, 1.0, 9.0, 11.0):
            now[0] = second
            log.log(logging.getLogger("test"), "topic", "line")
            log.log(logging.getLogger("test"), f"other {second}", "other")
    assert [r.getMessage() for r in caplog.records if "line" in r.getMessage()] == ["line", "line (2 more)"]


def test_the_plugin_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("TOKENFLOW_PLUGIN", "off")
    plugin.register()  # would fail: there is no sglang in this environment
    assert "the plugin is off" in caplog.text


def test_an_unknown_engine_version_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(plugin, "version", lambda _name: "0.6.0")
    plugin.register()
    assert "sglang 0.6.0 is unknown to this release (it knows 0.5.23)" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "is_cpu"),
    [
        (["--device", "cpu"], True),
        (["--device=cpu"], True),
        (["--device", "cuda"], False),
        (["--device=cuda", "--tp", "2"], False),
    ],
)
def test_the_device_that_was_asked_for_decides(arguments: list[str], is_cpu: bool):
    assert cpu_compat.is_cpu_run(arguments) is is_cpu


def test_cpu_defaults_never_override_what_was_given():
    given = ["--model-path", "m", "--attention-backend=intel_amx", "--device", "cpu"]
    assert cpu_compat.cpu_arguments(given) == [*given, "--sleep-on-idle"]


def test_hicache_on_a_cpu_gets_the_layout_that_works_there():
    given = ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]
    wanted = [*given, "--enable-hierarchical-cache", "--hicache-mem-layout=page_first"]
    assert cpu_compat.cpu_arguments(wanted) == [*wanted, "--hicache-io-backend", "direct"]
    assert cpu_compat.cpu_arguments(given) == given
