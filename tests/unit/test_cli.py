"""The command line: helps, errors in one line, and the parts that must run without the web stack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

COMMANDS = ["up", "engine", "serve", "model", "model pull", "doctor"]


def tokenflow(*arguments: str, home: Path, code: str = "", **environ: str) -> CompletedProcess[str]:
    """Run the command in a process of its own, `code` first."""
    script = f"{code}\nimport sys; from tokenflow_gateway.cli import main; main()"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOKENFLOW_")}
    places = {"TOKENFLOW_HOME": str(home), "TOKENFLOW_RUNTIME_DIR": str(home / "run")}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**inherited, **places, **environ},
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, tmp_path: Path):
    done = tokenflow(*command.split(), "--help", home=tmp_path)
    assert done.returncode == 0
    assert f"Usage: tokenflow {command}" in done.stdout
    assert len(done.stdout.splitlines()) >= 6
    assert "\\b" not in done.stdout


@pytest.mark.parametrize("command", ["up", "engine", "serve"])
def test_commands_that_run_something_give_examples(command: str, tmp_path: Path):
    assert f"Examples:\n    tokenflow {command}" in tokenflow(command, "--help", home=tmp_path).stdout


@pytest.mark.parametrize("variable", ["TOKENFLOW_HOME", "TOKENFLOW_PORT", "TOKENFLOW_ENGINE_PORT", "MODEL"])
def test_up_names_its_environment_variables(variable: str, tmp_path: Path):
    assert variable in tokenflow("up", "--help", home=tmp_path).stdout


BLOCK_WEB_STACK = """
import sys
for name in ("aiohttp", "fastapi", "httpx", "pydantic", "uvicorn", "starlette", "structlog", "yaml"):
    sys.modules[name] = None
"""


def test_without_the_web_stack_serve_says_what_to_install(tmp_path: Path):
    done = tokenflow("serve", "--engine", "http://127.0.0.1:1", home=tmp_path, code=BLOCK_WEB_STACK)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install '.[gateway]'" in done.stderr


def test_without_the_web_stack_the_rest_works(tmp_path: Path):
    done = tokenflow("doctor", "--port", "1", home=tmp_path, code=BLOCK_WEB_STACK)
    assert "gateway port" in done.stdout
    assert "Traceback" not in done.stderr


def test_engine_without_an_engine_is_one_line(tmp_path: Path):
    done = tokenflow("engine", home=tmp_path, TOKENFLOW_ENGINE_PORT="39999")
    assert done.returncode == 1
    assert done.stderr == (
        "tokenflow: There is no engine here yet: `tokenflow up --prepare` installs it (a few minutes, once)\n"
    )


def stand_in_for_the_engine(home: Path, script: str) -> None:
    """An interpreter of the engine's environment that does something else."""
    python = home / "engine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    stamps = home / "engine" / ".tokenflow-stamps"
    stamps.mkdir()
    (stamps / "plugin").touch()


def test_engine_replaces_itself_with_sglang_and_hands_over_arguments(tmp_path: Path):
    """A stand-in for the engine's interpreter shows what it was called with."""
    stand_in_for_the_engine(tmp_path, 'echo "$@"')
    arguments = ["engine", "--model", "some/name", "--port", "39999", "--", "--max-total-tokens", "64"]
    done = tokenflow(*arguments, home=tmp_path, TOKENFLOW_DEVICE="cpu")
    assert done.returncode == 0
    assert done.stdout.startswith("-m tokenflow_engine.sglang.launch --model-path some/name --host 127.0.0.1")
    assert done.stdout.endswith("--max-total-tokens 64\n")


def test_a_policy_may_have_options_and_must_have_a_known_name(tmp_path: Path):
    stand_in_for_the_engine(tmp_path, 'echo "$TOKENFLOW_POLICY"')
    command = ["engine", "--model", "some/name", "--port", "39999"]
    done = tokenflow(*command, "--policy", "adaptive:write_s=0", home=tmp_path, TOKENFLOW_DEVICE="cpu")
    assert (done.returncode, done.stdout) == (0, "adaptive:write_s=0\n")
    done = tokenflow(*command, home=tmp_path, TOKENFLOW_DEVICE="cpu", TOKENFLOW_POLICY="fifo:write_s=0")
    assert done.returncode == 2
    assert "'fifo:write_s=0' is not one of adaptive, andes, fcfs, tokenflow." in done.stderr


def test_doctor_exits_with_one_when_something_blocks(tmp_path: Path):
    (tmp_path / "file").touch()
    done = tokenflow("doctor", home=tmp_path / "file" / "home", TOKENFLOW_RUNTIME_DIR=str(tmp_path / "run"))
    assert done.returncode == 1
    assert "PROBLEM  home" in done.stdout


def test_ctrl_c_in_an_installation_is_one_line(tmp_path: Path):
    interrupt = """
from tokenflow_gateway.local.up import Up
def run(self): raise KeyboardInterrupt
Up.run = run
"""
    done = tokenflow("up", home=tmp_path, code=interrupt, TOKENFLOW_DEVICE="cpu")
    assert done.returncode == 130
    assert done.stderr == "Interrupted. The same command, run again, continues here.\n"


def test_serve_passes_only_what_was_given(tmp_path: Path):
    record = """
import sys, types
module = types.ModuleType("tokenflow_gateway.server")
module.serve = lambda config_file, overrides: print(config_file, overrides) or 2
sys.modules["tokenflow_gateway.server"] = module
"""
    done = tokenflow("serve", "--engine", "http://a", "--engine", "http://b", home=tmp_path, code=record)
    assert done.stdout == "None {'engines': ['http://a', 'http://b']}\n"
    assert done.returncode == 2
