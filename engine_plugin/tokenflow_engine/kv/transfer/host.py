"""The host table's memory."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from tokenflow_engine.kv.transfer.base import HostMemoryError, Run

__all__ = ["available_bytes", "digests", "host_table"]

_SHARE = 0.9
"""Of the available memory that a host pool may take."""


def host_table(tokens: int, words: int, word: torch.dtype) -> torch.Tensor:
    """An uninitialised table ``[tokens, words]``; `HostMemoryError` if the machine has too little memory."""
    wanted, available = tokens * words * word.itemsize, available_bytes()
    if wanted > available * _SHARE:
        raise HostMemoryError(
            f"a host pool of {tokens} tokens needs {wanted / 2**30:.1f} GiB, "
            f"and {available / 2**30:.1f} GiB are available"
        )
    return torch.empty((tokens, words), dtype=word)


def available_bytes() -> int:
    """Memory that this process can still get, with regard to its container's limit (cgroup 2)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def digests(table: torch.Tensor, run: Run) -> list[int]:
    """A checksum of each row."""
    return [zlib.crc32(row) for row in table[run.row : run.row + run.tokens].numpy()]
