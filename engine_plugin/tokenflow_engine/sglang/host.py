"""Host memory for this engine's KV: how much there is, and the backend that fits its pool."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from tokenflow_engine.kv.offload import OffloadManager
from tokenflow_engine.kv.transfer.base import Direction, HostMemoryError, Run, Transfer, TransferFault
from tokenflow_engine.sglang.guard import InjectedFault

__all__ = ["offload_manager"]

_logger = logging.getLogger(__name__)

_TIMES_DEVICE = 4
_SHARE_OF_FREE = 0.4
_PAGE_TOKENS = 16


def offload_manager(scheduler: Any) -> OffloadManager | None:
    """One for this rank's KV pool; None where there can be none, and streams are recomputed instead.

    ``TOKENFLOW_HOST_KV_TOKENS`` is its size in tokens, 0 for none; by default four times the device's
    pool, as far as 40 % of the free memory goes.
    """
    if scheduler.tp_size > 1:
        _logger.info("TokenFlow: no host memory for KV: ranks would have to agree on when copies end")
        return None
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if type(pool) is not MHATokenToKVPool:
        _logger.info("TokenFlow: no host memory for KV: a pool of type %s is not known", type(pool).__name__)
        return None
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        _logger.info("TokenFlow: no host memory for KV: a row of this pool is a page, not a token")
        return None
    buffers = [*pool.k_buffer, *pool.v_buffer]
    tokens = _tokens(scheduler, buffers)
    if tokens < _PAGE_TOKENS:
        return None
    try:
        transfer = _transfer(scheduler, buffers, tokens)
    except (HostMemoryError, ValueError) as error:
        _logger.warning("TokenFlow: no host memory for KV: %s", error)
        return None
    return OffloadManager(transfer, page_tokens=_PAGE_TOKENS)


def _tokens(scheduler: Any, buffers: Sequence[Any]) -> int:
    given = os.environ.get("TOKENFLOW_HOST_KV_TOKENS")
    if given:
        return int(given)
    a_token = sum(buffer[0].numel() * buffer.element_size() for buffer in buffers)
    ranks = max(1, scheduler.tp_size)
    affordable = int(_free_bytes() * _SHARE_OF_FREE / a_token / ranks)
    wanted = _TIMES_DEVICE * scheduler.max_total_num_tokens
    return int(min(wanted, affordable)) // _PAGE_TOKENS * _PAGE_TOKENS


def _free_bytes() -> int:
    """Of main memory, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _transfer(scheduler: Any, buffers: Sequence[Any], tokens: int) -> Transfer:
    if str(scheduler.device).startswith("cuda"):
        from tokenflow_engine.kv.transfer.cuda import CudaTransfer

        stream = scheduler.forward_stream if scheduler.enable_overlap else None
        return CudaTransfer(buffers, host_tokens=tokens, forward_stream=stream)
    from tokenflow_engine.kv.transfer.cpu import CpuTransfer

    tables: list[Any] = []
    transfer = CpuTransfer(buffers, host_tokens=tokens, fault=_fault(tables))
    tables.append(transfer.table)
    return transfer


def _fault(tables: list[Any]) -> TransferFault | None:
    """For tests, by ``TOKENFLOW_FAULT``.

    ``corrupt_kv``: host memory forgets what it holds as it is loaded; ``fail_kv``: every second load fails.
    """
    faults = os.environ.get("TOKENFLOW_FAULT", "").split(",")
    strikes = cycle([True, False])
    if not {"corrupt_kv", "fail_kv"} & set(faults):
        return None

    def strike(direction: Direction, runs: Sequence[Run]) -> None:
        if direction is not Direction.LOAD:
            return
        if "fail_kv" in faults and next(strikes):
            raise InjectedFault("TOKENFLOW_FAULT is set for 'fail_kv'")
        for run in runs if "corrupt_kv" in faults else ():
            tables[0][run.row : run.row + run.tokens].zero_()

    return strike
