"""The command line that starts SGLang with the plugin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenflow_gateway.local.machine import Device

__all__ = ["EngineCommand"]

PAGE_TOKENS = 16
MIN_KV_TOKENS = 8_192
MAX_KV_TOKENS = 32_768
KV_SHARE_OF_MEMORY = 0.1
BF16_BYTES = 2
_QUIET = ["--log-level-http", "warning"]
"""Health probes would otherwise write two lines a second into the engine's log."""


@dataclass(frozen=True, kw_only=True)
class EngineCommand:
    """One engine: which model, where it listens, on what it runs. `extra` goes to SGLang as it is."""

    python: Path
    model: str
    served_name: str | None
    host: str
    port: int
    device: Device
    available_memory_bytes: int
    extra: tuple[str, ...] = ()
    policy: str | None = None
    """How it schedules; None leaves it to the environment, or the plugin's default."""

    def argv(self) -> list[str]:
        """The whole command; what `extra` says comes last and so wins."""
        base = [str(self.python), "-m", "tokenflow_engine.sglang.launch", "--model-path", self.model]
        name = ["--served-model-name", self.served_name] if self.served_name else []
        place = ["--host", self.host, "--port", str(self.port), *_QUIET]
        return [*base, *name, *place, *(self._cpu_options() if self.device == "cpu" else []), *self.extra]

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The engine's environment: a model that lies here is loaded without asking its hub."""
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.model).is_dir() else {}
        policy = {} if self.policy is None else {"TOKENFLOW_POLICY": self.policy}
        return {**offline, **inherited, **policy}

    def _cpu_options(self) -> list[str]:
        options = {
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--dtype": "bfloat16",
            "--page-size": str(PAGE_TOKENS),
            "--max-total-tokens": str(self._kv_tokens()),
        }
        return [word for option in options.items() for word in option]

    def _kv_tokens(self) -> int:
        """A tenth of the free memory for KV cache, within bounds, in whole pages."""
        per_token = _kv_bytes_per_token(Path(self.model) / "config.json")
        if per_token is None:
            return MIN_KV_TOKENS
        fitting = int(self.available_memory_bytes * KV_SHARE_OF_MEMORY / per_token)
        return min(max(fitting, MIN_KV_TOKENS), MAX_KV_TOKENS) // PAGE_TOKENS * PAGE_TOKENS


def _kv_bytes_per_token(config_file: Path) -> int | None:
    """Keys and values of all layers for one token; None where the model does not say or is not here."""
    try:
        config = json.loads(config_file.read_text())
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return int(2 * BF16_BYTES * config["num_hidden_layers"] * kv_heads * width)
    except (OSError, ValueError, KeyError):
        return None
