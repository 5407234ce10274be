"""HiCache on a CPU: the two things that SGLang has for GPUs only. For tests and for trying it out.

With ``--hicache-io-backend direct`` and ``--hicache-mem-layout layer_first``, which `cpu_compat` makes the
defaults there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["provide"]


def provide() -> None:
    """Give SGLang's host pools what they lack without a GPU. Before the first of them is made; idempotent."""
    from sglang.srt.mem_cache.pool_host import common, mha

    common.ALLOC_MEMORY_FUNCS["cpu"] = _host_buffer
    mha.transfer_kv_direct = _transfer_kv_direct


def _host_buffer(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, **_of_pinned_memory: Any
) -> torch.Tensor:
    """Not pinned, but taken from the machine at once as pinned memory is, so that it counts as used."""
    return torch.empty(dims, dtype=dtype, device=device).zero_()


def _transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """`sgl_kernel.kvcacheio.transfer_kv_direct`: rows `src_indices` to rows `dst_indices`, in each layer."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
