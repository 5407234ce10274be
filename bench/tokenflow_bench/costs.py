"""What work costs on some machines: cost models from `machines.toml`, with their sources."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["MACHINES", "Machine", "read_machines"]

_FILE = Path(__file__).with_name("machines.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One engine: its memory, its link to the host, what steps cost. In seconds and KV tokens."""

    name: str
    step_base_s: float
    step_per_stream_s: float
    step_per_context_token_s: float
    prefill_base_s: float
    prefill_per_token_s: float
    kv_tokens: int
    kv_token_bytes: int
    host_tokens: int
    to_host_bytes_s: float
    to_device_bytes_s: float
    to_device_busy_bytes_s: float
    """While a copy to the host is under way."""
    copy_base_s: float = 0.001
    """Launch and gather of one copy."""
    max_running: int = 256
    page_tokens: int = 1
    chunk_tokens: int = 2048
    """SGLang's `--chunked-prefill-size` for this memory size."""
    late_tokens: bool = False
    """A pass's tokens come when the next one is over, if that begins at once: SGLang's overlap schedule."""
    gpu: str = ""
    model: str = ""
    quality: str = ""
    """How far the figures can be trusted, in words."""
    source: str = ""

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """One decode step."""
        return (
            self.step_base_s + self.step_per_stream_s * batch + self.step_per_context_token_s * context_tokens
        )

    def prefill_s(self, tokens: float) -> float:
        """One prefill."""
        return self.prefill_base_s + self.prefill_per_token_s * tokens

    def capacity(self, mean_context: float, *, prompt_share: float = 0.0) -> float:
        """Tokens a second with memory full of streams of `mean_context`: what `load` is measured against.

        `prompt_share`: prompt tokens to prefill for each token that is generated.
        """
        batch = max(min(int(self.kv_tokens / mean_context), self.max_running), 1)
        step_s = self.decode_s(batch, batch * mean_context)
        return 1.0 / (step_s / batch + self.prefill_per_token_s * prompt_share)


def read_machines(path: Path) -> dict[str, Machine]:
    """By name. Raises `ValueError` for a machine with a field too many or too few."""
    tables = tomllib.loads(path.read_text())

    @cache
    def fields_of(name: str) -> dict[str, Any]:
        own = dict(tables[name])
        return {**(fields_of(own.pop("like")) if "like" in own else {}), **own}

    machines = {}
    for name in tables:
        try:
            machines[name] = Machine(name=name, **fields_of(name))
        except TypeError as error:
            raise ValueError(f"{path.name}: [{name}]: {error}") from None
    return machines


MACHINES = read_machines(_FILE)
