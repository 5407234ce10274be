"""Which of several processes on one port this is, and what all of them share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["MAX_WORKERS", "Worker"]

MAX_WORKERS = 64
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One of `count` processes that serve one port. All have the same keys, made once."""

    index: int
    count: int
    capability_key: bytes
    learning_key: bytes
    """Readers have the same name in all workers; see `readers.learned`."""
    folder: Path
    """Private to this gateway: the workers' sockets, and what they have told of their counters."""

    @classmethod
    def crew(cls, count: int, folder: Path) -> list[Self]:
        """All workers of one gateway."""
        keys = {"capability_key": os.urandom(_KEY_BYTES), "learning_key": os.urandom(_KEY_BYTES)}
        return [cls(index=index, count=count, folder=folder, **keys) for index in range(count)]

    @classmethod
    def alone(cls) -> Self:
        """The gateway is one process, and puts nothing into a folder."""
        return cls.crew(1, Path())[0]

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    def socket(self, index: int) -> Path:
        """Where a worker answers the others."""
        return self.folder / f"{index}.sock"

    def counters(self, index: int) -> Path:
        """What a worker has told of its counters; see `workers.counters`."""
        return self.folder / f"{index}.counters"

    def gateway_id(self, name: str) -> str:
        """Its name to engines, which see each worker as a gateway of its own."""
        return name if self.is_alone else f"{name}#{self.index}"
