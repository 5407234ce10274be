"""Host memory as the executor has it: opened once, asked, waited for, and made room in when it is full."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenflow_engine.control.orders import Orders
from tokenflow_engine.kv.offload import Event, OffloadManager, OffloadStatistics
from tokenflow_engine.policy.due import gives_way
from tokenflow_engine.sglang import rows
from tokenflow_engine.sglang.holds import Held, Hold
from tokenflow_engine.sglang.host import HostRefusedError
from tokenflow_engine.sglang.tally import Tally

__all__ = ["HostTier"]

_logger = logging.getLogger(__name__)

_WAIT_S = 0.001
_MAX_WAITS = 10_000
"""Counted, not timed: all ranks give up at the same one."""


class HostTier:
    """`new_host` is asked, once, when host memory for KV is wanted; it may have none.

    `held` is the executor's own record of who is out of the batch. Every rank's tier is told the same, in the
    same order, and so does the same.
    """

    def __init__(
        self,
        scheduler: Any,
        held: Mapping[str, Held],
        *,
        new_host: Callable[[], OffloadManager | None],
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        self.manager: OffloadManager | None = None
        self.is_used = True
        """Whether orders stand that may use it."""
        self.loaded: dict[str, bool] = {}
        """Loads that have ended, and whether well."""
        self.released: set[str] = set()
        """Streams whose slots no copy touches any more."""
        self._scheduler = scheduler
        self._held = held
        self._new_host: Callable[[], OffloadManager | None] | None = new_host
        self._tally = tally
        self._clock = clock

    def open(self) -> OffloadManager | None:
        """Take host memory for KV, if there is any and it was not taken yet."""
        if self._new_host is not None:
            new_host, self._new_host = self._new_host, None
            try:
                self.manager = new_host()
            except HostRefusedError:
                self._tally.host_refused = 1
            except Exception:
                self._tally.host_refused = 1
                _logger.exception("TokenFlow: no host memory for KV, streams are recomputed instead")
        return self.manager

    # ---- what others ask ---------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Tokens for which it has room."""
        host = self._usable
        return 0 if host is None else host.host_free

    def load_s(self, tokens: float) -> float | None:
        """See `Copies`."""
        host = self._usable
        return None if host is None else host.load_s(tokens)

    def evict_s(self, tokens: float) -> float | None:
        """See `Copies`."""
        host = self._usable
        return None if host is None else host.evict_s(tokens)

    def statistics(self) -> OffloadStatistics | None:
        """None where there is no host memory for KV."""
        return None if self.manager is None else self.manager.statistics()

    def synced(self, rid: str) -> int:
        """Tokens of this stream that it holds."""
        return 0 if self.manager is None else self.manager.synced(rid)

    def synced_share(self) -> float:
        """Of the KV on the device, the share that it holds too."""
        reqs = [*self._scheduler.running_batch.reqs, *(entry.req for entry in self._held.values())]
        on_device = {req.rid: req.kv.kv_committed_len for req in reqs if req.kv.holds_kv}
        synced = sum(min(tokens, self.synced(rid)) for rid, tokens in on_device.items())
        return float(synced / max(1, sum(on_device.values())))

    # ---- what happens ------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in which copies have ended."""
        if self.manager is None:
            return
        for done in self.manager.poll():
            entry = self._held.get(done.rid)
            if entry is None:
                continue
            if done.event is Event.RELEASED:
                self.released.add(done.rid)
            elif done.event is Event.WRITE_FAILED:
                entry.is_unsaved = entry.hold is Hold.LEAVING
                _logger.warning("TokenFlow: saving %s failed: %s", done.rid, done.error)
            elif done.event in (Event.LOADED, Event.LOAD_FAILED):
                self.loaded[done.rid] = done.event is Event.LOADED
                if done.error:
                    _logger.warning("TokenFlow: loading %s failed: %s", done.rid, done.error)

    def await_copies(self) -> bool:
        """Wait until none is under way, some ten seconds at most; whether there was any."""
        host = self.manager
        if host is None:
            return False
        waited, began = False, self._clock()
        for _ in range(_MAX_WAITS):
            seen = host.statistics()
            if not seen.writing_tokens + seen.loading_tokens:
                break
            waited = True
            self.poll()
            time.sleep(_WAIT_S)
        self.poll()
        self._tally.copy_wait_s += self._clock() - began
        return waited

    def stop_copies(self, entry: Held) -> None:
        """Have no copy touch its slots any more; waits, at most as long as the copies under way take."""
        rid = entry.req.rid
        if self.drop(rid) or not entry.req.kv.holds_kv:
            return
        for _ in range(_MAX_WAITS):
            if rid in self.released:
                self.released.discard(rid)
                return
            time.sleep(_WAIT_S)
            self.poll()
        raise RuntimeError(f"copies of {rid} do not end")

    def drop(self, rid: str) -> bool:
        """Forget a stream; False while a copy still touches its slots, until it is `released`."""
        return self.manager is None or self.manager.drop(rid)

    # ---- who leaves the device ---------------------------------------------------------------------

    def wants(self, entry: Held) -> bool:
        """Whether it would take this stream's KV if there was room."""
        return self._usable is not None and not entry.is_unsaved

    def save(self, entry: Held, orders: Orders) -> tuple[bool | None, list[Held]]:
        """Whether its KV is here; False if it cannot be, None if it is under way. And who made room for it.

        Those had their only copies here, and are to be recomputed.
        """
        host, req = self.manager, entry.req
        if host is None:
            return False, []
        if not self.wants(entry):
            host.drop(req.rid)
            return False, []
        tokens, row = req.kv.kv_committed_len, rows.row_of(self._scheduler, req)
        gone: list[Held] = []
        for _ in range(2):  # again at once if room was made: another one that leaves would take it
            taken = host.write(req.rid, row, tokens, leaving=True)
            if host.detach(req.rid, tokens):
                return True, gone
            if taken or host.is_writing(req.rid):
                return None, gone
            missing = tokens - host.synced(req.rid)
            if host.reclaim(missing, self._on_device()):
                continue
            later = host.reclaim(missing, self._later(req.rid, orders), host_only=True)
            gone += [self._held[rid] for rid in later]
            if not later:
                break
        host.drop(req.rid)
        return False, gone

    def saved_at_once(self, entries: list[Held]) -> list[Held]:
        """Of those that `save` has under way, whose slots are free once their copies are with the backend.

        Mostly only what the last passes have added was missing: on a GPU it is on its way then, on a CPU done
        (`Transfer.release`).
        """
        host = self.manager
        if host is None or not entries:
            return []
        host.prepare_forward()
        return [entry for entry in entries if host.detach(entry.req.rid, entry.req.kv.kv_committed_len)]

    def _on_device(self) -> list[str]:
        """Whose copies are duplicates."""
        parked = (e.req for e in self._held.values() if e.hold is Hold.PARKED)
        return [req.rid for req in (*self._scheduler.running_batch.reqs, *parked)]

    def _later(self, rid: str, orders: Orders) -> Iterable[str]:
        """Who is here alone, and due back so much later than `rid` that it may give way; the latest first."""
        wanted = {wanted for wanted, _ in orders.load}
        for other in gives_way(orders.due_s, rid):
            entry = self._held.get(other)
            if entry is not None and entry.hold is Hold.OFFLOADED and other not in wanted:
                yield other

    @property
    def _usable(self) -> OffloadManager | None:
        """Host memory, unless the orders do without it."""
        return self.manager if self.is_used else None
