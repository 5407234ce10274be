"""What the plugin registers in the engine's own environment, and when it keeps out."""

from __future__ import annotations

import json
import subprocess

import pytest

from support.real_engine import engine_python

pytestmark = [pytest.mark.engine, pytest.mark.slow]

_SCRIPT = """
import json, os
from tokenflow_engine.sglang import cpu_compat
cpu_compat.install()
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from tokenflow_engine.sglang import plugin

known = plugin.version
seen = {}
os.environ["TOKENFLOW_PLUGIN"] = "off"
plugin.register()
seen["off"] = len(HookRegistry._hooks)
del os.environ["TOKENFLOW_PLUGIN"]
plugin.version = lambda name: "0.6.0"
plugin.register()
seen["unknown version"] = len(HookRegistry._hooks)
plugin.version = known
load_plugins()
seen["registered"] = sorted(t.rpartition(".")[2] for t in HookRegistry._hooks)
seen["applied"] = sorted(t.rpartition(".")[2] for t in HookRegistry._patched)
print(json.dumps(seen))
"""


def test_hooks_are_registered_for_a_known_version_only_and_all_targets_exist():
    done = subprocess.run([engine_python(), "-c", _SCRIPT], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["off"] == 0
    assert seen["unknown version"] == 0
    assert "TOKENFLOW_PLUGIN=off" in done.stderr
    assert "passive, no hooks are registered: sglang 0.6.0 is unknown" in done.stderr
    assert seen["registered"]
    assert seen["applied"] == seen["registered"]
