"""`tokenflow keys` and `tokenflow check-config`, as people and scripts call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from tokenflow_gateway.cli import cli
from tokenflow_gateway.config import load_settings
from tokenflow_gateway.schema import config_schema
from tokenflow_gateway.store.keys import KEYS_FILE, KeyStore
from tokenflow_gateway.tenants.commands import check_config, keys
from tokenflow_gateway.tenants.keyring import Keyring
from tokenflow_gateway.tenants.keys import parse_key

DOCS = Path(__file__).parents[2] / "docs"
URL = "http://127.0.0.1:30000"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENFLOW_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(keys, arguments)


def create(*arguments: str) -> dict[str, object]:
    made: dict[str, object] = json.loads(call("create", "--tenant", "acme", "--json", *arguments).stdout)
    return made


def test_a_key_is_shown_once_and_opens(state: Path) -> None:
    shown = call("create", "--tenant", "acme")
    assert shown.exit_code == 0
    key = parse_key(shown.stdout.strip())
    assert key is not None
    with KeyStore(state / KEYS_FILE) as store:
        assert Keyring(store.records()).find(key).tenant == "acme"
    for arguments in (["list"], ["list", "--all", "--json"]):
        listed = call(*arguments)
        assert key.id in listed.stdout
        assert key.secret not in listed.output
        assert key.hash.hex() not in listed.output


def test_what_a_key_is_bound_to(state: Path) -> None:
    create("--kind", "client", "--classes", "gold, bronze", "--engines", "e1", "--label", "ci")
    create("--requests-per-minute", "5", "--budget-tokens", "1000", "--budget-period", "day")
    with KeyStore(state / KEYS_FILE) as store:
        first, second = store.records()
    assert (first.classes, first.engines, first.label) == (("gold", "bronze"), frozenset({"e1"}), "ci")
    assert first.limits.is_unlimited
    assert (second.limits.requests_per_minute, second.limits.budget_period) == (5, "day")


def test_rotation_makes_an_equal_key_and_ends_the_old_one() -> None:
    old = create("--expires-in", "30d", "--classes", "gold")
    new = json.loads(call("rotate", str(old["id"]), "--overlap", "1h", "--json").stdout)
    assert new["replaces"] == old["id"]
    assert (new["tenant"], new["classes"], new["kind"]) == ("acme", ["gold"], "client")
    listed = {entry["id"]: entry for entry in json.loads(call("list", "--json").stdout)}
    assert listed[old["id"]]["expires"] < old["expires"]  # type: ignore[operator]  # in an hour
    assert json.loads(call("rotate", str(new["id"]), "--overlap", "0s", "--json").stdout)
    assert new["id"] not in call("list").stdout


def test_a_revoked_key_is_listed_only_when_asked_for_and_cannot_be_rotated() -> None:
    made = create()
    assert call("revoke", str(made["id"])).exit_code == 0
    assert call("list").stdout.strip() == "no keys"
    assert '"revoked"' in call("list", "--all", "--json").stdout
    refused = call("rotate", str(made["id"]))
    assert refused.exit_code == 1
    assert "is revoked" in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create"], "Missing option '--tenant'"),
        (["create", "--tenant", "a b"], "is no name"),
        (["create", "--tenant", "a", "--expires-in", "soon"], "no duration such as"),
        (["create", "--tenant", "a", "--classes", ","], "name at least one"),
        (["revoke", "nobody"], "there is no key 'nobody'"),
        (["rotate", "nobody"], "there is no key 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: list[str], message: str) -> None:
    refused = call(*arguments)
    assert refused.exit_code in {1, 2}
    assert message in refused.output
    assert "Traceback" not in refused.output


def test_keys_of_a_configured_directory(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(f"engines: [{URL}]\nstate_dir: {tmp_path / 'other'}\n")
    # the environment goes before the file, as at the gateway itself
    runner = CliRunner(env={"TOKENFLOW_STATE_DIR": None})
    assert runner.invoke(keys, ["create", "--tenant", "a", "--config", str(config)]).exit_code == 0
    assert (tmp_path / "other" / KEYS_FILE).exists()


def test_a_valid_file_is_valid(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(f"engines: [{URL}]\nclasses: {{gold: {{weight: 4}}}}\n")
    shown = CliRunner().invoke(check_config, [str(config)])
    assert (shown.exit_code, shown.stdout) == (0, f"{config} is valid\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes: {gold: {weight: 0}}", "classes.gold.weight: Input should be greater"),
        ("routes: {/v1/nowhere: {}}", "routes: /v1/nowhere is not served"),
        ("clases: {}", "unknown setting clases"),
    ],
)
def test_a_file_that_would_not_start_is_named_with_its_fault(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(f"engines: [{URL}]\n{text}\n")
    refused = CliRunner().invoke(cli, ["check-config", str(config)])
    assert refused.exit_code == 1
    assert message in refused.output
    assert len(refused.output.strip().splitlines()) == 1


def test_the_schema_takes_the_documented_example_and_refuses_what_the_gateway_refuses(tmp_path: Path) -> None:
    documented = (DOCS / "configuration.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "documented.yaml").write_text(documented)
    assert load_settings(tmp_path / "documented.yaml").engines
    schema = Draft202012Validator(config_schema())
    schema.validate(yaml.safe_load(documented))
    schema.validate({"engines": [URL]})
    for text in ("ports: 1", "port: many", "classes: {gold: {weight: 0}}", "engines: [{link: off}]"):
        assert list(schema.iter_errors(yaml.safe_load(text))), text


def test_the_published_schema_is_that_of_the_settings() -> None:
    """To renew it: ``tokenflow check-config --schema > docs/gateway.schema.json``."""
    published = DOCS / "gateway.schema.json"
    assert CliRunner().invoke(check_config, ["--schema"]).stdout == published.read_text()
