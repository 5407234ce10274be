"""SGLang with the plugin, and what tests need: ``python -m support.probed_launch <arguments>``.

Seeds on a CPU: SGLang honours ``sampling_seed`` with ``--enable-deterministic-inference`` alone, and that
only with attention backends for GPUs, because of kernels whose sums do not depend on the batch; and the hash
of its sampler is not in the published wheels. This admits the CPU's backend, leaves those kernels out, so
that seeds hold up to the noise of sums, and brings the hash.

Mixed passes: the log says so (`MIXED`) at the first that has decoding streams in it.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from tokenflow_engine.sglang import cpu_compat, launch

__all__ = ["MIXED"]

MIXED = "the first mixed pass, of streams that decode:"


def _admit_seeds() -> None:
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda: None


def _bring_the_hash() -> None:
    import torch

    low = 0xFFFFFFFF

    def rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
        return ((x << bits) | (x >> (32 - bits))) & low

    def mixed(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        key = rotated((key & low) * 0xCC9E2D51 & low, 15) * 0x1B873593 & low
        return (rotated(state ^ key, 13) * 5 + 0xE6546B64) & low

    def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """MurmurHash3 of seed, position and column, as `sglang.kernels.ops.sampling.murmur_hash` has it."""
        words = seed.view(torch.int64)
        state = torch.zeros_like(words)
        for key in (words, words >> 32, positions.to(torch.int64)):
            state = mixed(state, key)
        h = mixed(state[:, None], columns.to(torch.int64)[None, :]) ^ 16
        h = (h ^ (h >> 16)) * 0x85EBCA6B & low
        h = (h ^ (h >> 13)) * 0xC2B2AE35 & low
        return (h ^ (h >> 16)).to(torch.uint32)

    name = "sgl_kernel::murmur_hash32_cpu"
    torch.library.define(name, "(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    torch.library.impl(name, "CPU", murmur_hash32_cpu)


def _tell_of_mixed_passes() -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    mix = ScheduleBatch.mix_with_running

    def told(batch: Any, running: Any) -> None:
        logging.getLogger(__name__).warning("%s %d", MIXED, running.batch_size())
        ScheduleBatch.mix_with_running = mix
        mix(batch, running)

    ScheduleBatch.mix_with_running = told


if __name__ in ("__main__", "__mp_main__"):
    cpu_compat.install()
    _admit_seeds()
    _bring_the_hash()
    _tell_of_mixed_passes()

if __name__ == "__main__":
    launch.main(sys.argv[1:])
