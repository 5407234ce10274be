"""A backend shows that it moves KV without changing a bit, before any stream's KV is given to it."""

from __future__ import annotations

import time

import torch

from tokenflow_engine.kv.transfer.base import Direction, Run, Slots, Transfer
from tokenflow_engine.kv.transfer.rows import PoolRows

__all__ = ["why_not_exact"]

_PATIENCE_S = 30.0
_LOOK_EVERY_S = 5e-4


def why_not_exact(transfer: Transfer, rows: PoolRows, slots: Slots) -> str | None:
    """None if these slots come back from host memory as they went, in other places; otherwise what is wrong.

    `slots` are of the pool that `rows` and `transfer` are over, and nobody uses them. They hold afterwards
    what they held before. Blocks, for some milliseconds; no forward pass may be launched meanwhile. A
    transfer that is not exact has been closed.
    """
    _finish(rows)
    slots = slots[: transfer.host_tokens].to(device=rows.device, dtype=torch.int64)
    before = _gathered(rows, slots)
    try:
        why_not = _round_trip(transfer, rows, slots)
    except Exception as error:  # noqa: BLE001 - whatever it was, it is no backend to trust
        why_not = f"{type(error).__name__}: {error}"
    if why_not is not None:
        transfer.close()  # nothing may be under way when the slots are given back
    rows.scatter(slots, before)
    _finish(rows)
    return why_not


def _round_trip(transfer: Transfer, rows: PoolRows, slots: torch.Tensor) -> str | None:
    """Out to both ends of the host table, overwritten, and back in reverse; one slot stays as overwritten."""
    count = len(slots)
    kept, half = int(count > 1), count // 2
    host = [*range(half), *range(transfer.host_tokens - (count - half), transfer.host_tokens)]
    pattern = _noise(rows, count)
    _put(transfer, rows, slots, pattern)
    _copy(transfer, Direction.WRITE, slots, host)
    _put(transfer, rows, slots, ~pattern)
    _copy(transfer, Direction.LOAD, slots.flip(0)[: count - kept], host)
    expected = torch.cat([~pattern[:kept], pattern[: count - kept].flip(0)])
    wrong = int((_gathered(rows, slots) != expected).any(1).sum())
    return f"{wrong} of {count} tokens did not come back as they went" if wrong else None


def _copy(transfer: Transfer, direction: Direction, slots: torch.Tensor, host: list[int]) -> None:
    """Between these slots and the first of these host rows, in chunks; until it is done."""
    left = set()
    for start in range(0, len(slots), transfer.chunk_tokens):
        part = slots[start : start + transfer.chunk_tokens]
        left.add(transfer.submit(direction, [part], [Run(row, 1) for row in host[start:][: len(part)]]))
    deadline = time.monotonic() + _PATIENCE_S
    while left:
        for done in transfer.poll():
            if done.error is not None:
                raise RuntimeError(done.error)
            left.discard(done.ticket)
        if left and time.monotonic() > deadline:
            raise TimeoutError(f"a copy of {len(slots)} tokens takes longer than {_PATIENCE_S:.0f} s")
        time.sleep(_LOOK_EVERY_S)


def _noise(rows: PoolRows, count: int) -> torch.Tensor:
    limits, dice = torch.iinfo(rows.word), torch.Generator().manual_seed(0)
    shape = (count, rows.words)
    noise = torch.randint(limits.min, limits.max, shape, dtype=rows.word, generator=dice)
    return noise.to(rows.device)


def _put(transfer: Transfer, rows: PoolRows, slots: torch.Tensor, values: torch.Tensor) -> None:
    rows.scatter(slots, values)
    _finish(rows)
    transfer.forward_launched()


def _gathered(rows: PoolRows, slots: torch.Tensor) -> torch.Tensor:
    out = torch.empty((len(slots), rows.words), dtype=rows.word, device=rows.device)
    rows.gather(slots, out)
    return out


def _finish(rows: PoolRows) -> None:
    """Until all that was launched on the device has run."""
    if rows.device.type == "cuda":
        torch.cuda.synchronize(rows.device)
