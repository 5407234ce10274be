"""How much of the device's memory must stay free, and who leaves first for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenflow_engine.control.orders import Orders
from tokenflow_engine.sglang import rows
from tokenflow_engine.sglang.holds import Held

__all__ = ["held_by_rank", "missing_tokens", "private_tokens", "reserved_tokens", "running_by_rank"]

_STEPS_AHEAD = 4


def private_tokens(req: Any) -> int:
    """Tokens whose slots are this request's alone."""
    return int(req.kv.kv_allocated_len - req.kv.cache_protected_len)


def reserved_tokens(scheduler: Any, batch: Any) -> int:
    """Tokens that must stay free: what the next steps and the rest of a chunked prompt may take."""
    page = scheduler.page_size
    if page > 1:
        steps = page * sum(-req.kv.kv_committed_len % page < _STEPS_AHEAD for req in batch.reqs)
    else:
        steps = _STEPS_AHEAD * len(batch.reqs)
    chunked = scheduler.chunked_req
    if chunked is None:
        return int(steps)
    return int(steps + len(chunked.full_untruncated_fill_ids) - chunked.prefix_len + 2 * page)


def missing_tokens(scheduler: Any, batch: Any, *, freeing: int) -> int:
    """What has to leave for that, beside the `freeing` tokens on their way out; above 0 if anything has."""
    return reserved_tokens(scheduler, batch) - rows.free_tokens(scheduler) - freeing


def held_by_rank(held: Iterable[Held], orders: Orders) -> list[Held]:
    """Those to go first in front: as the plan ranks them, then the latest parked."""
    order = {rid: i for i, rid in enumerate(orders.write)}
    keep = set(orders.resume)
    entries = [entry for entry in held if entry.req.rid not in keep]
    return sorted(entries, key=lambda e: (order.get(e.req.rid, len(order)), -e.since, e.req.rid))


def running_by_rank(reqs: Iterable[Any], orders: Orders) -> list[Any]:
    """Those to go first in front: as the plan ranks them, then who would free most."""
    order = {rid: i for i, rid in enumerate(orders.write)}
    return sorted(reqs, key=lambda r: (order.get(r.rid, len(order)), -private_tokens(r), r.rid))
