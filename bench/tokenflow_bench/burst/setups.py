"""What is served, and to whom: sized so that about half of the readers fit into KV memory at a load of 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.real_engine import engine_python, tokenflow_home
from support.tiny_model import tiny_model
from tokenflow_bench.people import lognormal_rates
from tokenflow_bench.workload import Workload, burst_arrivals, normal_lengths

__all__ = ["SETUPS", "Setup"]

PAGE_TOKENS = 16
_LEAST_STREAMS = 4
_FIT = 0.5
"""Of the readers at load 1, how many whole streams KV memory is to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model and its readers. Lengths in tokens, `rate` in tokens per second."""

    name: str
    words: str
    model: Callable[[], Path]
    dtype: str
    prompt_words: int
    output: int
    rate: float
    sigma: float
    """Of the logarithm of the rates between people."""
    kv_tokens: int
    """Where the search for the right size begins."""
    max_running: int
    threads: int
    """Of the model. Several wait for each other by spinning, so they need cores that nobody else uses."""
    policies: tuple[str, ...]
    length_spread: float = 0.25

    def flags(self, kv_tokens: int) -> list[str]:
        """SGLang's arguments. The rest is its default: mixed chunks off, schedule conservativeness 1.0."""
        return [
            *("--dtype", self.dtype),
            *("--page-size", str(PAGE_TOKENS)),
            *("--max-total-tokens", str(kv_tokens)),
            *("--max-running-requests", str(self.max_running)),
        ]

    def readers(self, load: float, capacity: float) -> int:
        """How many people want `load` times what the engine can generate."""
        return max(round(load * capacity / self.rate), 2)

    def kv_for(self, capacity: float, footprint: float) -> int:
        """KV tokens in which half of the readers at load 1 fit, in whole pages; at least `_LEAST_STREAMS`."""
        streams = max(_FIT * self.readers(1.0, capacity), _LEAST_STREAMS)
        return round(streams * footprint / PAGE_TOKENS) * PAGE_TOKENS

    def burst(self, count: int, *, seed: int) -> Workload:
        """So many people at once."""
        rng = np.random.default_rng(seed)
        return Workload.of(
            burst_arrivals(count),
            normal_lengths(rng, count, mean=self.prompt_words, spread=self.length_spread),
            normal_lengths(rng, count, mean=self.output, spread=self.length_spread),
            lognormal_rates(rng, count, median=self.rate, sigma=self.sigma),
        )


def _tiny() -> Path:
    return tiny_model(tokenflow_home() / "models", python=engine_python())


def _smollm2() -> Path:
    return tokenflow_home() / "models" / "SmolLM2-135M-Instruct"


SETUPS: Mapping[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup(
            name="tiny",
            words="a Llama of 5 million random weights (float32)",
            model=_tiny,
            dtype="float32",
            prompt_words=40,
            output=250,
            rate=17.5,
            sigma=0.1,
            kv_tokens=5120,
            max_running=48,
            threads=1,
            policies=("fcfs", "andes", "tokenflow", "adaptive"),
        ),
        Setup(
            name="smollm2",
            words="SmolLM2-135M-Instruct (bfloat16)",
            model=_smollm2,
            dtype="bfloat16",
            prompt_words=40,
            output=120,
            rate=5.0,
            sigma=0.27,
            kv_tokens=1056,
            max_running=48,
            threads=1,
            policies=("fcfs", "andes", "tokenflow", "adaptive"),
        ),
    )
}
