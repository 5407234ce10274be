"""The two functions of `sgl_kernel` that a Llama-like model reaches on a CPU, in plain torch.

The published wheels of `sgl_kernel` are CUDA builds, and SGLang imports the package on its CPU path all the
same. `cpu_compat` puts this module in its place where the real one is missing. Every other function raises
when it is called, not when it is imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0.0+tokenflow.cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row, in place: row[start:end] = the next slots."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy slots `src_loc` to `tgt_loc` in every layer's buffer; all sources are read before any write."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, slot in zip(targets, slots, strict=True):
            ctypes.memmove(base + target * stride, slot, stride)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in: this model needs a GPU")

    return missing
