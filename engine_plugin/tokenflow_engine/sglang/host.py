"""Host memory for this engine's KV: how much there is, and the backend that fits its pool."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from tokenflow_engine.kv.offload import OffloadManager
from tokenflow_engine.kv.proof import why_not_exact
from tokenflow_engine.kv.transfer.agreed import AgreedTransfer
from tokenflow_engine.kv.transfer.base import Direction, HostMemoryError, Run, Transfer
from tokenflow_engine.kv.transfer.rows import PoolRows
from tokenflow_engine.sglang.guard import InjectedFault
from tokenflow_engine.sglang.ranks import Ranks

__all__ = ["HostRefusedError", "offload_manager"]

_logger = logging.getLogger(__name__)

_TIMES_DEVICE = 4
_SHARE_OF_FREE = 0.4
_PAGE_TOKENS = 16
_PROOF_TOKENS = 48
_FAULTS = {"corrupt_kv", "fail_kv", "inexact_kv", "slow_kv"}
_SLOW_S = 0.02


class HostRefusedError(RuntimeError):
    """Host memory for KV stays closed, because copies to it and back were not exact."""


def offload_manager(scheduler: Any) -> OffloadManager | None:
    """One for this rank's KV pool; None where there can be none, and streams are recomputed instead.

    All tensor-parallel ranks ask at the same step, and get one of the same size, or none.
    ``TOKENFLOW_HOST_KV_TOKENS`` is its size in tokens, 0 for none; by default four times the device's
    pool, as far as 40 % of the free memory goes. Raises `HostRefusedError` if copies are not exact, on any
    rank.
    """
    lowest = Ranks(scheduler).lowest if scheduler.tp_size > 1 else list[int]
    (tokens,) = lowest([_tokens(scheduler)])
    if tokens < _PAGE_TOKENS:
        return None
    transfer, verdict = _proven_transfer(scheduler, tokens)
    (common,) = lowest([verdict])
    if transfer is not None and common != _Verdict.EXACT:
        with suppress(Exception):  # it may be broken
            transfer.close()
    if common == _Verdict.REFUSED:
        raise HostRefusedError
    if transfer is None or common != _Verdict.EXACT:
        return None
    if scheduler.tp_size == 1:
        return OffloadManager(transfer, page_tokens=_PAGE_TOKENS)
    agreed = AgreedTransfer(transfer, lowest)
    return OffloadManager(
        agreed, page_tokens=_PAGE_TOKENS, common_s=agreed.common_s, ranks_lost=lambda: agreed.is_lost
    )


class _Verdict(IntEnum):
    """The lowest of all ranks holds."""

    REFUSED = 0
    NONE = 1
    EXACT = 2


def _proven_transfer(scheduler: Any, tokens: int) -> tuple[Transfer | None, _Verdict]:
    """The backend, as far as there is one, and whether it may be used. Raises nothing."""
    transfer: Transfer | None = None
    try:
        buffers = _buffers(scheduler)
        faults = _Faults(rank=scheduler.tp_group.rank_in_group)
        transfer = _transfer(scheduler, buffers, tokens, faults)
        with _unused_slots(scheduler) as slots:
            why_not = why_not_exact(transfer, PoolRows(buffers), slots)
    except Exception as error:  # noqa: BLE001 - the other ranks are waiting to hear
        _warn(error)
        return transfer, _Verdict.NONE
    if why_not is not None:
        _logger.error(
            "TokenFlow: no host memory for KV, streams are recomputed instead: "
            "copies to host memory and back are not exact: %s",
            why_not,
        )
        return transfer, _Verdict.REFUSED
    faults.is_armed = True
    return transfer, _Verdict.EXACT


def _warn(error: Exception) -> None:
    is_expected = isinstance(error, HostMemoryError | ValueError)
    _logger.warning("TokenFlow: no host memory for KV: %s", error, exc_info=not is_expected)


@contextmanager
def _unused_slots(scheduler: Any) -> Iterator[Any]:
    """Those of the pool's padding, and some that are free."""
    allocator, page = scheduler.token_to_kv_pool_allocator, scheduler.page_size
    padding = torch.arange(page, device=scheduler.device)
    wanted = max(page, _PROOF_TOKENS // page * page)
    free = allocator.alloc(wanted) if allocator.available_size() >= wanted else None
    if free is None:
        yield padding
        return
    try:
        yield torch.cat([padding, free])
    finally:
        allocator.free(free)


def _buffers(scheduler: Any) -> list[Any]:
    """The pool's tensors; ValueError for a pool that is not known."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if type(pool) is not MHATokenToKVPool:
        raise ValueError(f"a pool of type {type(pool).__name__} is not known")
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise ValueError("a row of this pool is a page, not a token")
    return [*pool.k_buffer, *pool.v_buffer]


def _tokens(scheduler: Any) -> int:
    """As many as this rank would have; 0 where there can be none. Raises nothing."""
    try:
        given = os.environ.get("TOKENFLOW_HOST_KV_TOKENS")
        if given:
            return _number(given)
        a_token = sum(buffer[0].numel() * buffer.element_size() for buffer in _buffers(scheduler))
        affordable = int(_free_bytes() * _SHARE_OF_FREE / a_token / max(1, scheduler.tp_size))
        wanted = _TIMES_DEVICE * scheduler.max_total_num_tokens
        return int(min(wanted, affordable)) // _PAGE_TOKENS * _PAGE_TOKENS
    except Exception as error:  # noqa: BLE001 - the other ranks are waiting to hear
        _warn(error)
        return 0


def _number(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(
            f"TOKENFLOW_HOST_KV_TOKENS={text!r} is no number of tokens: "
            "give a whole one, 0 for no host memory, or leave it out"
        )
    return int(text)


def _free_bytes() -> int:
    """Of main memory, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _transfer(scheduler: Any, buffers: Sequence[Any], tokens: int, faults: _Faults) -> Transfer:
    if str(scheduler.device).startswith("cuda"):
        from tokenflow_engine.kv.transfer.cuda import CudaTransfer

        stream = scheduler.forward_stream if scheduler.enable_overlap else None
        return CudaTransfer(buffers, host_tokens=tokens, forward_stream=stream)
    from tokenflow_engine.kv.transfer.cpu import CpuTransfer

    transfer = CpuTransfer(buffers, host_tokens=tokens, fault=faults if faults.any else None)
    faults.table = transfer.table
    return transfer


class _Faults:
    """For tests, by ``TOKENFLOW_FAULT``.

    ``corrupt_kv``: host memory forgets what it holds as it is loaded; ``fail_kv``: every second load fails;
    both once the backend has proved itself. ``inexact_kv``: as the first, but always. ``slow_kv``: each copy
    takes longer than a step. With ``@1`` behind it, on that rank alone.
    """

    def __init__(self, *, rank: int) -> None:
        given = [fault.partition("@") for fault in os.environ.get("TOKENFLOW_FAULT", "").split(",")]
        named = {name for name, _, where in given if where in ("", str(rank))}
        self.any = bool(named & _FAULTS)
        self.is_armed = False
        self.table: Any = None
        self._named = named
        self._strikes = cycle([True, False])

    def __call__(self, direction: Direction, runs: Sequence[Run]) -> None:
        if "slow_kv" in self._named:
            time.sleep(_SLOW_S)
        if direction is not Direction.LOAD:
            return
        if self.is_armed and "fail_kv" in self._named and next(self._strikes):
            raise InjectedFault("TOKENFLOW_FAULT is set for 'fail_kv'")
        if "inexact_kv" in self._named or (self.is_armed and "corrupt_kv" in self._named):
            for run in runs:
                self.table[run.row : run.row + run.tokens].zero_()
