"""What work costs on some machines: the cost models of the simulator.

Steps are `base + per_stream * B + per_context_token * S` (B: batch, S: context tokens in the batch), prefills
`base + per_token * n`. Sources:

- RTX 4090, Llama-3-8B bf16: fit to measured profiles of LLMServingSim, 1.1 % mean error.
- A6000, same model: same source, fewer points; KV tokens from 48 GB * 0.88 less 16 GB of weights.
- H200, same model: scaled by memory bandwidth and compute; an estimate. KV memory at fraction 0.3, as in the
  paper.
- Qwen2-7B on a 4090: the 4090's steps with 57 kB of KV a token (grouped heads), to which the paper's figures
  fit.
- laptop-tiny, laptop-smollm2: measured on two CPU cores with the real engine at 1, 8 and 32 streams.
- Host link: pinned PCIe 4, 25 GB/s one way; host to device falls to 12 GB/s while the other way is busy. PCIe
  5 twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["MACHINES", "Machine"]

_LLAMA3_8B = 2 * 32 * 8 * 128 * 2
_QWEN2_7B = 2 * 28 * 4 * 128 * 2


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

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """One decode step."""
        return (
            self.step_base_s + self.step_per_stream_s * batch + self.step_per_context_token_s * context_tokens
        )

    def prefill_s(self, tokens: float) -> float:
        """One prefill."""
        return self.prefill_base_s + self.prefill_per_token_s * tokens

    def capacity(self, mean_context: float) -> float:
        """Tokens a second with memory full of streams of `mean_context`: what `load` is measured against."""
        batch = max(min(int(self.kv_tokens / mean_context), self.max_running), 1)
        return batch / self.decode_s(batch, batch * mean_context)


_RTX4090 = Machine(
    name="4090",
    step_base_s=0.0170,
    step_per_stream_s=0.042e-3,
    step_per_context_token_s=1.434e-7,
    prefill_base_s=0.0042,
    prefill_per_token_s=0.0913e-3,
    kv_tokens=41408,
    kv_token_bytes=_LLAMA3_8B,
    host_tokens=400_000,
    to_host_bytes_s=25e9,
    to_device_bytes_s=25e9,
    to_device_busy_bytes_s=12e9,
)

_TINY = Machine(
    name="laptop-tiny",
    step_base_s=0.007,
    step_per_stream_s=0.55e-3,
    step_per_context_token_s=0.0,
    prefill_base_s=0.005,
    prefill_per_token_s=0.1e-3,
    kv_tokens=4096,
    kv_token_bytes=2048,
    host_tokens=65_536,
    to_host_bytes_s=1e9,
    to_device_bytes_s=1e9,
    to_device_busy_bytes_s=0.5e9,
    max_running=48,
    page_tokens=16,
)

MACHINES = {
    machine.name: machine
    for machine in (
        _RTX4090,
        replace(
            _RTX4090,
            name="4090-qwen2-7b",
            kv_tokens=41408 * _LLAMA3_8B // _QWEN2_7B,
            kv_token_bytes=_QWEN2_7B,
        ),
        replace(
            _RTX4090,
            name="a6000",
            step_base_s=0.0234,
            step_per_stream_s=0.041e-3,
            step_per_context_token_s=1.87e-7,
            prefill_base_s=0.004,
            prefill_per_token_s=0.188e-3,
            kv_tokens=180_000,
        ),
        replace(
            _RTX4090,
            name="h200",
            step_base_s=0.0045,
            step_per_stream_s=0.008e-3,
            step_per_context_token_s=3.36e-8,
            prefill_base_s=0.003,
            prefill_per_token_s=0.028e-3,
            kv_tokens=200_000,
            host_tokens=2_000_000,
            to_host_bytes_s=50e9,
            to_device_bytes_s=50e9,
            to_device_busy_bytes_s=25e9,
            max_running=512,
            chunk_tokens=8192,
        ),
        _TINY,
        replace(
            _TINY,
            name="laptop-smollm2",
            step_base_s=0.050,
            step_per_stream_s=7.6e-3,
            prefill_base_s=0.050,
            prefill_per_token_s=2.0e-3,
            kv_tokens=16_384,
            kv_token_bytes=23_040,
        ),
    )
}
