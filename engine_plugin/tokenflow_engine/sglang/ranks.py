"""What the tensor-parallel ranks of one engine tell each other of ours."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

__all__ = ["Ranks"]

_PATIENCE = timedelta(seconds=120)
"""For the slowest rank to come to the same step. SGLang's watchdog ends a scheduler that is stuck longer."""


class Ranks:
    """A process group of their own, on CPUs: what goes wrong in it leaves the engine's messages alone.

    All ranks make it at the same step.
    """

    def __init__(self, scheduler: Any) -> None:
        ranks = scheduler.tp_group.ranks
        self._group = distributed.new_group(
            ranks, timeout=_PATIENCE, backend="gloo", use_local_synchronization=True
        )

    def lowest(self, values: list[int]) -> list[int]:
        """See `Lowest`. Waits for all ranks; RuntimeError if one does not come within two minutes."""
        tensor = torch.tensor(values, dtype=torch.int64)
        distributed.all_reduce(tensor, distributed.ReduceOp.MIN, group=self._group)
        return [int(value) for value in tensor.tolist()]
