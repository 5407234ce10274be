"""The store through which the ranks of one machine find each other: torch's listens on every interface."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_parallel
from torch.distributed import TCPStore

from tokenflow_engine.sglang.guard import guarded

__all__ = ["create_store"]

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "0.0.0.0")  # noqa: S104 - connecting to the last means loopback


def create_store(
    original: Callable[..., Any], hostname: str, port: int, rank: int, *rest: Any, **named: Any
) -> Any:
    """In place of torch's `_create_c10d_store`: rank 0 of a single machine serves on loopback alone."""
    store = _on_loopback(hostname, port, rank, *rest, **named)
    return original(hostname, port, rank, *rest, **named) if store is None else store


@guarded("store")
def _on_loopback(
    hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True
) -> TCPStore | None:
    has_only_local_clients = world_size == 1 or hostname in _LOOPBACK_NAMES
    if rank != 0 or get_parallel().nnodes > 1 or not has_only_local_clients:
        return None
    listener = socket.create_server(("127.0.0.1", port))
    return TCPStore(
        host_name="127.0.0.1",
        port=port,
        world_size=world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        use_libuv=use_libuv,
    )
