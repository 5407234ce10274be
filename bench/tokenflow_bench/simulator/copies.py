"""Copies between device and host: one copy engine a direction, first in, first out; or one for both."""

from __future__ import annotations

from tokenflow_bench.costs import Machine

__all__ = ["Copies"]


class Copies:
    """When copies end. Times in seconds, sizes in KV tokens; `bytes_moved` counts both directions.

    Without `overlap`, a copy waits for those of both directions.
    """

    def __init__(self, machine: Machine, *, overlap: bool = True) -> None:
        self._machine = machine
        self._overlap = overlap
        self._to_host_free = 0.0
        self._to_device_free = 0.0
        self.bytes_moved = 0

    def evict(self, tokens: int, *, now: float) -> float:
        """Queue a copy to the host; the time at which it is done."""
        self._to_host_free = self._to_host_starts(now) + self._to_host_s(tokens)
        self.bytes_moved += tokens * self._machine.kv_token_bytes
        return self._to_host_free

    def load(self, tokens: int, *, now: float) -> float:
        """Queue a copy to the device; the time at which it is done."""
        self._to_device_free = self._to_device_starts(now) + self._to_device_s(tokens, now)
        self.bytes_moved += tokens * self._machine.kv_token_bytes
        return self._to_device_free

    def evict_s(self, tokens: float, *, now: float) -> float:
        """Seconds until a copy to the host, queued now, would be done."""
        return self._to_host_starts(now) - now + self._to_host_s(tokens)

    def load_s(self, tokens: float, *, now: float) -> float:
        """Seconds until a copy to the device, queued now, would be done."""
        return self._to_device_starts(now) - now + self._to_device_s(tokens, now)

    @property
    def idle_at(self) -> float:
        """When all that is queued is done."""
        return max(self._to_host_free, self._to_device_free)

    def idle_tokens(self, *, now: float, until: float) -> int:
        """Tokens that can be written to the host in the background in this time: what evictions leave."""
        idle_s = until - max(self._to_host_free, now)
        return max(int(idle_s * self._machine.to_host_bytes_s / self._machine.kv_token_bytes), 0)

    def wrote(self, tokens: int) -> None:
        """Count what was written in the background."""
        self.bytes_moved += tokens * self._machine.kv_token_bytes

    def _to_host_starts(self, now: float) -> float:
        return max(now, self._to_host_free if self._overlap else self.idle_at)

    def _to_device_starts(self, now: float) -> float:
        return max(now, self._to_device_free if self._overlap else self.idle_at)

    def _to_host_s(self, tokens: float) -> float:
        machine = self._machine
        return machine.copy_base_s + tokens * machine.kv_token_bytes / machine.to_host_bytes_s

    def _to_device_s(self, tokens: float, now: float) -> float:
        machine = self._machine
        busy = self._overlap and self._to_host_free > now
        rate = machine.to_device_busy_bytes_s if busy else machine.to_device_bytes_s
        return machine.copy_base_s + tokens * machine.kv_token_bytes / rate
