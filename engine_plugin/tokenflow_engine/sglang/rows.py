"""A request's KV in SGLang's pools: giving it up, and taking slots for one that comes back."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, alloc_token_slots
from sglang.srt.mem_cache.common import evict_from_tree_cache, match_kv_cache, release_kv_cache

__all__ = ["forget_kv", "free_tokens", "give_up", "row_of", "take", "unshared_prefix"]


def free_tokens(scheduler: Any) -> int:
    """Slots free at once: unallocated, and cached prefixes that nobody uses."""
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    return int(allocator.available_size() + tree.evictable_size())


def unshared_prefix(scheduler: Any, req: Any) -> int:
    """Of its cached prefix, the tokens that would become evictable if it let go: nobody else uses them.

    Finds out by letting go for a moment, because the tree does not say who holds what.
    """
    tree = scheduler.tree_cache
    if req.lock is None:
        return 0
    node, before = req.lock.node, tree.evictable_size()
    tree.unlock(req.lock)
    freed = tree.evictable_size() - before
    req.lock = tree.lock(node)
    return int(freed)


def row_of(scheduler: Any, req: Any) -> Any:
    """The slots of a request's tokens, from the first one on."""
    return scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]


def give_up(scheduler: Any, req: Any, *, is_sound: bool = True, is_saved: bool = False) -> None:
    """Release row and slots, of which no pass and no copy may make use any more.

    What the prefix cache can key stays in it, evictable, until somebody needs the room; unless it `is_sound`
    no longer, as after half a load. HiCache would copy what enters the cache to host memory of its own, and
    keep it on the device until then: KV that `is_saved` in host memory already does not enter it.
    """
    tree = scheduler.tree_cache
    is_copied_twice = is_saved and tree.cache_controller is not None
    release_kv_cache(req, tree, checkpoint=is_sound and not is_copied_twice)


def forget_kv(req: Any) -> None:
    """After `give_up`: the request holds nothing, and a prefill would start it again where it was."""
    req.reset_for_retract()


def take(scheduler: Any, req: Any, *, spare: int) -> Any | None:
    """Take a row and slots for all tokens but the last; those to be filled, from `req.prefix_len` on.

    What the prefix cache still holds is shared, not taken. None, and nothing is taken, if afterwards fewer
    than `spare` tokens would be free, or if there is no row.
    """
    tree, tokens = scheduler.tree_cache, req.seqlen - 1
    match_kv_cache(req, tree, max_prefix_len=tokens)
    prefix = req.prefix_len
    req.lock = tree.lock(req.last_node)
    wanted = (-(-(tokens - prefix) // scheduler.page_size) + 1) * scheduler.page_size
    has_row = scheduler.req_to_token_pool.available_size() > 0
    has_room = free_tokens(scheduler) >= wanted + spare
    if not (has_row and has_room and _is_free(scheduler, wanted)):
        tree.unlock(req.lock)
        req.lock, req.last_node, req.prefix_len = None, None, 0
        return None
    shared = tree.prefix_device_indices(req) if prefix else None
    slots = _allocate(scheduler, prefix, tokens, shared)
    pool = scheduler.req_to_token_pool
    pool.alloc([req])
    row = req.kv.req_pool_idx
    if shared is not None:
        pool.write((row, slice(0, prefix)), shared.to(torch.int32))
    pool.write((row, slice(prefix, tokens)), slots.to(torch.int32))
    req.kv.cache_protected_len = req.kv.cache_inserted_len = prefix
    req.kv.kv_allocated_len = req.kv.kv_committed_len = tokens
    req.is_retracted = False
    return slots


def _is_free(scheduler: Any, tokens: int) -> bool:
    """Whether so many slots could be freed. With HiCache evicting may fail: its own host memory is full."""
    evict_from_tree_cache(scheduler.tree_cache, tokens)
    return bool(scheduler.token_to_kv_pool_allocator.available_size() >= tokens)


def _allocate(scheduler: Any, prefix: int, tokens: int, shared: Any | None) -> Any:
    tree, device = scheduler.tree_cache, scheduler.device
    if tokens == prefix:
        return torch.empty((0,), dtype=torch.int64, device=device)
    if scheduler.page_size == 1:
        return alloc_token_slots(tree, tokens - prefix)
    before = torch.tensor([prefix], dtype=torch.int64)
    after = torch.tensor([tokens], dtype=torch.int64)
    nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
    return alloc_paged_token_slots_extend(
        tree_cache=tree,
        prefix_lens=before.to(device),
        prefix_lens_cpu=before,
        seq_lens=after.to(device),
        seq_lens_cpu=after,
        last_loc=nowhere if shared is None else shared[-1:].to(torch.int64),
        extend_num_tokens=tokens - prefix,
    )
