"""Which parts of the plugin a policy may use: all, unless one is taken away to see what it is worth."""

from __future__ import annotations

import msgspec

__all__ = ["ALL_PARTS", "Parts"]


class Parts(msgspec.Struct, kw_only=True, frozen=True, array_like=True):
    """Each can be switched off in a policy's spelling (`adaptive:offload=0`), as the engine runs."""

    offload: bool = True
    """KV goes to host memory; without it, a stream that has to leave the device is computed again."""
    write_through: bool = True
    """KV is copied while its stream runs; without it, only when the stream has to leave."""
    overlap: bool = True
    """Copies run beside the forward pass and each other; without it, the engine waits for each of them."""
    pauses: bool = True
    """Readers who pause are known to; without it, they are thought to read on."""


ALL_PARTS = Parts()
