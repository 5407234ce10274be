"""Settings: where they come from, in which order, and what a bad one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenflow_gateway.config import ConfigError, is_loopback, load_settings

URL = "http://127.0.0.1:30000"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tokenflow.yaml"
    path.write_text(text)
    return path


def test_engine_urls_are_enough() -> None:
    settings = load_settings(overrides={"engines": [URL, "http://127.0.0.1:30001/v1/"]})
    assert [engine.url for engine in settings.engines] == [URL, "http://127.0.0.1:30001"]
    assert settings.engines[0].name == "127.0.0.1:30000"
    assert settings.host == "127.0.0.1"


def test_command_line_beats_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, f"engines: [{URL}]\nport: 1001\nlog_level: debug\ntimeouts: {{idle_s: 7}}\n")
    monkeypatch.setenv("TOKENFLOW_PORT", "1002")
    monkeypatch.setenv("TOKENFLOW_TIMEOUTS__CONNECT_S", "3")
    assert load_settings(path).port == 1002
    settings = load_settings(path, {"port": 1003})
    assert (settings.port, settings.log_level) == (1003, "debug")
    assert (settings.timeouts.idle_s, settings.timeouts.connect_s) == (7, 3)


def test_engines_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFLOW_ENGINES", f"{URL}, http://127.0.0.1:30001")
    assert len(load_settings().engines) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 8080", "no engine given: use --engine"),
        ("engines: []", "no engine given: use --engine"),
        ("engines: [ftp://x]", "not an http(s) URL"),
        (f"engines: [{URL}]\nport: many", "port: Input should be a valid integer"),
        (f"engines: [{URL}]\nports: 1", "unknown setting ports"),
        (f"engines: [{URL}, {URL}]", "two engines share a name"),
        (f"engines: [{{url: {URL}, weight: 3}}]", "engines.0.weight: Extra inputs are not permitted"),
        (f"engines: [{URL}]\ntimeouts: {{idle_s: 0}}", "timeouts.idle_s: Input should be greater than 0"),
        (f"engines: [{URL}]\ntimeouts: {{total_s: -1}}", "timeouts.total_s: Input should be greater than 0"),
        (
            f"engines: [{URL}]\nroutes: {{/v1/embeddings: {{timeouts: {{idle: 1}}}}}}",
            "routes./v1/embeddings.timeouts.idle: Extra inputs are not permitted",
        ),
        (f"engines: [{URL}]\nredis: {{url: 'http://redis'}}", "redis.url: not a URL such as redis://"),
        (f"engines: [{URL}]\nredis: {{url: 'redis://:pa/ss@redis'}}", "redis.url: no valid port: are the"),
        (f"engines: [{URL}]\ntenants: {{a/b: {{}}}}", "tenants: 'a/b' is no name"),
        (
            f"engines: [{URL}]\ntenants: {{acme: {{classes: [gold]}}}}",
            "tenants.acme.classes: there is no class 'gold'; known are default",
        ),
        (
            f"engines: [{URL}]\ntenants: {{acme: {{engines: [x]}}}}",
            "tenants.acme.engines: there is no engine 'x'; known are 127.0.0.1:30000",
        ),
        (
            f"engines: [{URL}]\ntenants: {{acme: {{default_class: gold}}}}",
            "tenants.acme: default_class 'gold' is not among classes",
        ),
        (
            f"engines: [{URL}]\nclasses: {{a: {{share_floor: 0.6}}, b: {{share_floor: 0.6}}}}",
            "the share floors add up to 1.2",
        ),
        (
            f"engines: [{URL}]\nclasses: {{a: {{weight: 2, max_weight: 1}}}}",
            "classes.a: max_weight is below weight",
        ),
        (f"engines: [{URL}]\ntrusted_proxies: [10.0.0.1/8]", "trusted_proxies.0"),
        (f"engines: [{URL}]\nanonymous: maybe", "anonymous: Input should be 'auto', 'allow' or 'deny'"),
        (
            f"engines: [{URL}]\ntelemetry: {{otlp_endpoint: 127.0.0.1:4318}}",
            "telemetry.otlp_endpoint: '127.0.0.1:4318' is not an http(s) URL",
        ),
        (
            f"engines: [{URL}]\nkeep_alive: {{form: ping}}",
            "keep_alive.form: Input should be 'none', 'comment'",
        ),
        (f"engines: [{URL}]\nkeep_alive: {{every_s: 0}}", "keep_alive.every_s: Input should be greater"),
        (f"engines: [{URL}]\nmax_attempts: 0", "max_attempts: Input should be greater than or equal to 1"),
        (f"engines: [{URL}]\nmax_connections: 0", "max_connections: Input should be greater"),
        (
            f"engines: [{URL}]\ndelivery: {{at_cap: drop}}",
            "delivery.at_cap: Input should be 'hold' or 'abort'",
        ),
        ("engines: [{url: http://127.0.0.1:99999}]", "no valid port"),
        ("engines: [http://127.0.0.1:abc]", "no valid port"),
        ("engines: [http://user:sekret@127.0.0.1]", "give the key as api_key"),
        ("engines: ['http://127.0.0.1/?a=b']", "not an http(s) URL"),
        (f"engines: [{{url: {URL}, link: garbage}}]", "neither ipc://PATH"),
        (f'engines: [{{url: {URL}, api_key: "a\\nb"}}]', "engines.0.api_key: not a key"),
        (f"engines: [{URL}]\nadmin_token: ''", "admin_token"),
        (f"engines: [{URL}]\nshutdown_grace_s: .inf", "shutdown_grace_s"),
        ("[1, 2]", "must hold a mapping"),
        ("engines: [", "not valid YAML"),
    ],
)
def test_a_bad_file_names_the_fault_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_settings(write(tmp_path, text))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "sekret" not in str(raised.value)
    assert ("no engine given" in message) == ("no engine given" in str(raised.value))


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [(name, False) for name in ("127.evil.com", "127.0.0.1.nip.io", "", "0.0.0.0", "10.0.0.1", "[::1")],
)
def test_what_is_loopback(host: str, *, is_ours: bool) -> None:
    assert is_loopback(host) is is_ours


def test_a_variable_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFLOW_TIMEOUTS", "abc")
    with pytest.raises(ConfigError, match="timeouts"):
        load_settings(overrides={"engines": [URL]})


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFLOW_PORT", "many")
    with pytest.raises(ConfigError, match="TOKENFLOW_PORT"):
        load_settings(overrides={"engines": [URL]})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.yaml: No such file"):
        load_settings(tmp_path / "nowhere.yaml")


def test_secrets_are_not_printed() -> None:
    settings = load_settings(
        overrides={"engines": [{"url": URL, "api_key": "hush"}], "admin_token": "hush", "link_secret": "hush"}
    )
    assert "hush" not in repr(settings)
