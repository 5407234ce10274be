"""The engine's environment and command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tokenflow_gateway.local.engine_command import EngineCommand
from tokenflow_gateway.local.environment import disk_needed_bytes, engine_steps, find_engine_python
from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.source import Source, package_source

GIB = 1024**3
SOURCE = Source(("-e", "/src"), "metadata")


def command(**fields) -> list[str]:
    given = {
        "python": Path("/engine/bin/python"),
        "model": "/models/m",
        "served_name": None,
        "host": "127.0.0.1",
        "port": 30000,
        "device": "cpu",
        "available_memory_bytes": 16 * GIB,
    }
    return EngineCommand(**{**given, **fields}).argv()


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_on_a_cpu_torch_comes_with_its_dependencies_and_the_rest_without():
    steps = {step.name: step for step in engine_steps(Home(Path("/h")), device="cpu", source=SOURCE)}
    assert list(steps) == ["venv", "torch", "packages", "plugin"]
    assert "--no-deps" not in steps["torch"].argv
    assert "--no-deps" in steps["packages"].argv
    assert "sglang==0.5.23" in steps["packages"].content
    assert steps["plugin"].argv[-3:] == ("--no-deps", "-e", "/src")


def test_every_engine_package_is_pinned():
    steps = {step.name: step for step in engine_steps(Home(Path("/h")), device="cpu", source=SOURCE)}
    lines = [line for line in steps["packages"].content.splitlines() if not line.startswith("#")]
    assert len(lines) > 50
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)


def test_on_a_gpu_sglang_brings_all_it_needs():
    steps = {step.name: step for step in engine_steps(Home(Path("/h")), device="cuda", source=SOURCE)}
    assert list(steps) == ["venv", "packages", "plugin"]
    assert "sglang==0.5.23" in steps["packages"].argv
    assert "--no-deps" not in steps["packages"].argv


def test_a_finished_installation_needs_no_room():
    assert disk_needed_bytes(device="cpu", missing_steps=0) == 0
    assert disk_needed_bytes(device="cuda", missing_steps=1) > disk_needed_bytes(
        device="cpu", missing_steps=1
    )


def test_without_an_engine_the_person_is_told_how_to_get_one(tmp_path: Path):
    with pytest.raises(SetupError, match="tokenflow up --prepare"):
        find_engine_python(Home(tmp_path))


def test_a_half_made_environment_is_no_engine(tmp_path: Path):
    home = Home(tmp_path)
    home.engine_python.parent.mkdir(parents=True)
    home.engine_python.touch()
    with pytest.raises(SetupError):
        find_engine_python(home)
    home.stamps.mkdir()
    (home.stamps / "plugin").touch()
    assert find_engine_python(home) == home.engine_python


def test_this_checkout_is_installed_editable():
    source = package_source()
    root = Path(source.pip_arguments[-1])
    assert source.pip_arguments[0] == "-e"
    assert (root / "gateway" / "tokenflow_gateway" / "cli.py").is_file()
    assert 'name = "tokenflow-serving"' in source.content


def test_cpu_options_are_for_the_cpu_alone():
    assert option(command(), "--device") == "cpu"
    assert option(command(), "--attention-backend") == "torch_native"
    assert "--device" not in command(device="cuda")
    assert "--max-total-tokens" not in command(device="cuda")


def test_a_persons_own_arguments_come_last():
    assert command(extra=("--max-total-tokens", "99"))[-2:] == ["--max-total-tokens", "99"]


def test_the_served_name_is_given_when_there_is_one():
    assert "--served-model-name" not in command()
    assert option(command(served_name="Nice"), "--served-model-name") == "Nice"


@pytest.mark.parametrize(
    ("memory_bytes", "tokens"),
    [
        (GIB // 2, 8_192),  # never less than one long conversation
        (4 * GIB, 18_640),  # a tenth of 4 GiB in 23 kB tokens, whole pages
        (64 * GIB, 32_768),
    ],
)
def test_the_kv_cache_takes_a_tenth_of_the_memory(memory_bytes: int, tokens: int, tmp_path: Path):
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = command(model=str(tmp_path), available_memory_bytes=memory_bytes)
    assert int(option(argv, "--max-total-tokens")) == tokens
    assert tokens % int(option(argv, "--page-size")) == 0


def test_a_model_that_is_not_here_yet_gets_the_least(tmp_path: Path):
    assert option(command(model="some/name"), "--max-total-tokens") == "8192"


def test_a_model_that_lies_here_is_loaded_without_its_hub(tmp_path: Path):
    given = {"python": Path("p"), "served_name": None, "host": "h", "port": 1, "device": "cpu"}
    local = EngineCommand(**given, model=str(tmp_path), available_memory_bytes=GIB)
    assert local.environ({"A": "b"}) == {"A": "b", "HF_HUB_OFFLINE": "1"}
    assert local.environ({"HF_HUB_OFFLINE": "0"}) == {"HF_HUB_OFFLINE": "0"}
    assert EngineCommand(**given, model="some/name", available_memory_bytes=GIB).environ({}) == {}
