"""Gather and scatter of KV rows as one kernel over all layers.

One launch a chunk instead of one for each layer's K and V: 64 launches for Llama-3-8B, about 0.4 ms of the
scheduler's thread. Rows are moved in words of eight bytes, neighbouring threads moving neighbouring words.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokenflow_engine.kv.transfer.rows import PoolRows

__all__ = ["FusedRows"]

_MAX_BLOCK = 1024


class FusedRows:
    """`gather` and `scatter` as those of `PoolRows`, for pools whose rows are whole words of eight bytes."""

    def __init__(self, pool: PoolRows) -> None:
        assert pool.word is torch.int64
        self._words = pool.words
        widths = [table.shape[1] for table in pool.tables]
        self._block = min(triton.next_power_of_2(max(widths)), _MAX_BLOCK)
        self._grid = (len(widths), triton.cdiv(max(widths), self._block))
        columns = [
            [table.data_ptr() for table in pool.tables],
            [table.stride(0) for table in pool.tables],
            widths,
            pool.columns[:-1],
        ]
        self._layout = torch.tensor(columns, dtype=torch.int64, device=pool.device)
        """Four rows, a column for each table: address, words from row to row, words of a row, first word in
        `rows`."""

    def gather(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Copy these slots into the rows of `out`, ``[tokens, words]``, contiguous."""
        self._launch(indices, out, to_pool=False)

    def scatter(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the contiguous rows into these slots, which are all different."""
        self._launch(indices, rows, to_pool=True)

    def _launch(self, indices: torch.Tensor, rows: torch.Tensor, *, to_pool: bool) -> None:
        assert rows.is_contiguous()
        grid = (len(indices), *self._grid)
        _move_rows[grid](
            self._layout, indices, rows, self._grid[0], self._words, TO_POOL=to_pool, BLOCK=self._block
        )


@triton.jit  # type: ignore[untyped-decorator]
def _move_rows(
    layout: Any, indices: Any, rows: Any, tables: Any, row_words: Any,
    TO_POOL: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    table = tl.load(layout + column).to(tl.pointer_type(tl.int64))
    stride = tl.load(layout + tables + column)
    width = tl.load(layout + 2 * tables + column)
    first = tl.load(layout + 3 * tables + column)
    slot = tl.load(indices + token)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = word < width
    in_pool = table + slot * stride + word
    in_rows = rows + token * row_words + first + word
    if TO_POOL:
        tl.store(in_pool, tl.load(in_rows, mask=inside), mask=inside)
    else:
        tl.store(in_rows, tl.load(in_pool, mask=inside), mask=inside)
