"""The device's pool as rows: all that one slot holds, over all layers, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenflow_engine.kv.transfer.base import Slots

__all__ = ["PoolRows"]

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class PoolRows:
    """Tables of machine words over the pool's tensors, each of shape ``[slots, ...]`` with contiguous rows.

    K and V of every layer, or the one tensor a layer of MLA; whatever dtypes. The tensors stay the engine's.
    Raises ValueError for a layout in which a slot's row is not contiguous.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.device = buffers[0].device
        self.word = next(word for word in _WORDS if all(_fits(buffer, word.itemsize) for buffer in buffers))
        self.tables = [_table(buffer, self.word) for buffer in buffers]
        self.columns = [0]
        """Where in a row each table's words begin, and at last the row's length."""
        for table in self.tables:
            self.columns.append(self.columns[-1] + table.shape[1])

    @property
    def words(self) -> int:
        """Of one token."""
        return self.columns[-1]

    @property
    def bytes_per_token(self) -> int:
        return self.words * int(self.word.itemsize)

    def indices(self, slots: Sequence[Slots]) -> torch.Tensor:
        """The parts one after another, as a new tensor on the pool's device."""
        return torch.cat(list(slots)).to(device=self.device, dtype=torch.int64, non_blocking=True)

    def gather(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Copy these slots into the rows of `out`, ``[tokens, words]``."""
        for table, start, end in zip(self.tables, self.columns, self.columns[1:], strict=False):
            torch.index_select(table, 0, indices, out=out[:, start:end])

    def scatter(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the rows into these slots, which are all different."""
        for table, start, end in zip(self.tables, self.columns, self.columns[1:], strict=False):
            table.index_copy_(0, indices, rows[:, start:end])


def _fits(buffer: torch.Tensor, word_bytes: int) -> bool:
    item = buffer.element_size()
    row_bytes = buffer[0].numel() * item
    return all(n % word_bytes == 0 for n in (row_bytes, buffer.stride(0) * item, buffer.data_ptr()))


def _table(buffer: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    if not buffer[0].is_contiguous():
        raise ValueError(f"the rows of a KV tensor of shape {tuple(buffer.shape)} are not contiguous")
    return buffer.flatten(1).view(word)
