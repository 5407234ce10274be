"""Orders carried out on the scheduler's thread: streams leave the batch and come back, token for token.

Every rank runs one executor, with the same orders, on the same state. A stream that is out of the batch is
*held*:

    RUNNING ─park─▶ PARKED ─evict─▶ leaving ─▶ OFFLOADED ─load─▶ LOADING ─▶ RUNNING
                      └───────resume, until its KV has gone──────▶ RUNNING
                       leaving or OFFLOADED ─▶ WAITING    (no room in host memory: a prefill brings it back)

With SGLang's overlap loop the result of the last pass is still to come when a stream is parked. It is
processed as if nothing had happened, and only then may the stream go on: back into the batch, or off the
device. So no sampled token is ever lost or drawn again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenflow_engine.control.orders import STOCK, Orders
from tokenflow_engine.kv.offload import OffloadManager
from tokenflow_engine.policy.base import Phase, Place, Reason
from tokenflow_engine.sglang import batch as batches
from tokenflow_engine.sglang import memory, rows
from tokenflow_engine.sglang.eligible import why_request_is_fixed
from tokenflow_engine.sglang.holds import AWAY, PHASES, Held, Hold
from tokenflow_engine.sglang.returns import Returns
from tokenflow_engine.sglang.tally import Tally
from tokenflow_engine.sglang.tier import HostTier

__all__ = ["Executor", "Moved"]

_logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 4
_LAST_TOKENS = 24
"""Copies are a few passes behind, and of whole pages of 16: who lacks no more in host memory is synced."""

Moved = Callable[[Any, Phase, Reason | None], None]
"""Told of each request that changes its place; with a reason where it is the executor's own."""


class Executor:
    """See the module. `new_host`: see `HostTier`."""

    def __init__(
        self,
        scheduler: Any,
        *,
        new_host: Callable[[], OffloadManager | None],
        moved: Moved | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally()
        self.returns = Returns()
        self.is_short = False
        """Whether memory ran short in the last step; whoever plans should plan again."""
        self._scheduler = scheduler
        self._moved = moved or (lambda _req, _phase, _reason: None)
        self._clock = clock
        self._orders = STOCK
        self._is_fresh = False
        self._passes = 0
        self._batch: Any | None = None
        """The decode batch of the step in hand."""
        self._held: dict[str, Held] = {}
        self.host = HostTier(scheduler, self._held, new_host=new_host, tally=self.tally, clock=clock)
        self._staying: list[str] = []
        """Streams that were called back before they had left."""
        self._recomputing: list[Any] = []
        self._dropped: set[str] = set()
        """Preempted streams that wait for a prefill until a plan admits them."""

    # ---- what others ask ---------------------------------------------------------------------------

    @property
    def orders(self) -> Orders:
        """Those that stand."""
        return self._orders

    @property
    def holds(self) -> bool:
        """Whether any stream is out of the batch."""
        return bool(self._held)

    def held(self) -> list[Any]:
        """The requests that are out of the batch, wherever their KV is."""
        return [entry.req for entry in self._held.values()]

    def phase(self, rid: str) -> Phase | None:
        """Where a held stream is; None for others."""
        entry = self._held.get(rid)
        return None if entry is None else PHASES[entry.hold]

    @property
    def counts(self) -> tuple[int, int]:
        """Streams parked on the device, and streams whose KV is off it or on its way back."""
        away = sum(e.hold in AWAY for e in self._held.values())
        return len(self._held) - away, away

    @property
    def may_admit(self) -> bool:
        """Not while streams that were taken off the device wait to come back under the engine's own rule."""
        return not self._orders.stock or self.counts[1] == 0

    def freeing_tokens(self) -> int:
        """KV of streams that are leaving the device, free as soon as it has been copied."""
        return sum(memory.private_tokens(e.req) for e in self._held.values() if e.hold is Hold.LEAVING)

    @property
    def moving_share(self) -> float | None:
        """Of the device's KV memory, what belongs to streams on their way out or in; None if none is away."""
        if not self._held:
            return None
        moving = (e.req for e in self._held.values() if e.hold in (Hold.LEAVING, Hold.LOADING))
        return float(sum(map(memory.private_tokens, moving)) / self._scheduler.max_total_num_tokens)

    def first_in_line(self) -> list[str]:
        """Streams that a prefill is to bring back before anybody else's."""
        if self._recomputing:
            queue = set(self._scheduler.waiting_queue)
            self._recomputing = [req for req in self._recomputing if req in queue]
        return [req.rid for req in self._recomputing]

    # ---- what happens ------------------------------------------------------------------------------

    def listen(self, moved: Moved) -> None:
        """Tell `moved` of every request that changes its place from now on."""
        self._moved = moved

    def order(self, orders: Orders) -> None:
        """Take over new orders; the next `step` begins with them."""
        self._follow(orders)
        self._is_fresh = True
        self._staying = []
        if self._held or self._dropped:
            self._note_wanted(orders, self._clock())

    def finished(self, reqs: Iterable[Any]) -> None:
        """The engine has finished these."""
        for req in reqs:
            self.ended(req.rid)

    def ended(self, rid: str) -> None:
        """The engine has finished this request, or put it back into its queue: host memory forgets it."""
        self._held.pop(rid, None)
        self._dropped.discard(rid)
        self.returns.forget(rid)
        self.host.drop(rid)

    def step(self, batch: Any) -> Any:
        """Once a scheduling pass, on the decode batch; the batch to go on with."""
        self.host.poll()
        self._passes += 1
        if not self._held and self._orders.stock:
            self._is_fresh = False
            return batch
        now = self._clock()
        flying = batches.in_flight(self._scheduler)
        self._batch = batch
        self._settle(flying)
        self._begin(batch, now)
        self._keep_memory(batch, now)
        self._leave(flying)
        if not self._orders.parts.overlap and self.host.await_copies():
            self._leave(flying)
        self._load(batch)
        if not self._orders.parts.overlap:
            self.host.await_copies()
        self._batch = batch = self._return(batch, flying, now)
        return batch

    def write_through(self, step_s: float) -> None:
        """Copy what the plan names to host memory, as much as fits beside a pass of this length."""
        host, parts = self.host.manager, self._orders.parts
        if host is None or not (self._orders.write and parts.offload and parts.write_through):
            return
        host.begin_iteration(host.budget_tokens(step_s))
        flying = self._prefilling()
        running = {req.rid: req for req in self._scheduler.running_batch.reqs}
        for rid in self._orders.write:
            req = running.get(rid) or self._parked(rid)
            if req is None or req in flying or req.finished() or not req.kv.holds_kv:
                continue
            host.write(rid, rows.row_of(self._scheduler, req), req.kv.kv_committed_len)
        if not parts.overlap:
            self.host.await_copies()

    def launching(self, batch: Any) -> None:
        """A forward pass is about to be launched."""
        self.returns.launched(batch, self._scheduler.chunked_req, self._clock())
        if self.host.manager is not None:
            self.host.manager.prepare_forward()

    def launched(self) -> None:
        """It was."""
        if self.host.manager is not None:
            self.host.manager.forward_launched()

    # ---- giving everything back --------------------------------------------------------------------

    def surrender(self) -> None:
        """The engine retracts everything it runs: it shall find what is held among it."""
        running = self._scheduler.running_batch
        for entry in list(self._held.values()):
            self.host.stop_copies(entry)
            if entry.req.kv.holds_kv and entry.is_sound:
                running.reqs = [*running.reqs, entry.req]
            else:
                self._to_queue(entry)
            self._held.pop(entry.req.rid, None)

    def recover(self, batch: Any) -> Any:
        """After an error in `step`: everybody back, by a prefill where nothing else is sure.

        Stock orders stand then. The batch to go on with.
        """
        batch, self._batch = self._batch or batch, None
        self._follow(STOCK)
        self._is_fresh = False
        for entry in list(self._held.values()):
            if entry.hold in (Hold.PARKED, Hold.LEAVING, Hold.ENDING):
                continue
            try:
                self.host.stop_copies(entry)
                self._to_queue(entry)
            except Exception:
                _logger.exception("TokenFlow: stream %s could not be restored", entry.req.rid)
        return self._return(batch, batches.in_flight(self._scheduler), self._clock())

    # ---- parts of a step ---------------------------------------------------------------------------

    def _follow(self, orders: Orders) -> None:
        self._orders = orders
        self.host.is_used = orders.parts.offload

    def _note_wanted(self, orders: Orders, now: float) -> None:
        """Whom these orders want back; a dropped stream that is admitted is on its way."""
        admitted = self._dropped if orders.stock else self._dropped.intersection(orders.admit)
        for rid in admitted:
            self.returns.begin(rid, "recomputed", now)
        self._dropped = self._dropped - admitted
        wanted = list(self._held) if orders.stock else [*orders.resume, *(rid for rid, _ in orders.load)]
        self.returns.ask(wanted, now)

    def _settle(self, flying: set[Any]) -> None:
        """Streams that ended while they were held, by their last token or by an abort."""
        for entry in list(self._held.values()):
            req = entry.req
            if entry.hold is Hold.ENDING:
                self._end(entry)
            elif req.finished():
                self.ended(req.rid)
            elif req.to_finish is not None and req not in flying:
                entry.is_sound = entry.hold is not Hold.LOADING
                entry.hold = Hold.ENDING
                self.host.released.discard(req.rid)
                if self.host.drop(req.rid) or entry.req.kv.req_pool_idx is None:
                    self.host.released.add(req.rid)
                self._end(entry)

    def _end(self, entry: Held) -> None:
        """Finish an aborted stream as the engine finishes one that runs."""
        req = entry.req
        if req.rid not in self.host.released:
            return
        self.host.released.discard(req.rid)
        del self._held[req.rid]
        req.finished_reason, req.to_finish = req.to_finish, None
        if req.kv.holds_kv:
            rows.give_up(self._scheduler, req, is_sound=entry.is_sound)
        req.time_stats.set_completion_time()
        self._scheduler.output_streamer.stream_output([req], req.return_logprob)

    def _begin(self, batch: Any, now: float) -> None:
        """Parks and evictions that were ordered; once an order."""
        if not self._is_fresh:
            return
        self._is_fresh = False
        running = {req.rid: req for req in batch.reqs}
        leaving = [running[rid] for rid in (*self._orders.park, *self._orders.evict) if rid in running]
        self._park(batch, leaving, now, reason=None)
        for rid in self._orders.evict:
            self._want_off(rid)

    def _park(self, batch: Any, reqs: Iterable[Any], now: float, *, reason: Reason | None) -> None:
        going = [req for req in reqs if self._may_preempt(req)]
        if not going:
            return
        for req in going:
            self._held[req.rid] = Held(req, Hold.PARKED, now)
            self.tally.parked += 1
            self.tally.thrashed += self.returns.leaves(req.rid, now)
        batches.leave(batch, going)
        for req in going:
            self._moved(req, Phase.PARKED, reason)

    def _may_preempt(self, req: Any) -> bool:
        why_not = why_request_is_fixed(req)
        if why_not is not None:
            self.tally.fixed[why_not] = self.tally.fixed.get(why_not, 0) + 1
        return why_not is None and not req.finished() and req.to_finish is None

    def _want_off(self, rid: str, reason: Reason | None = None) -> None:
        entry = self._held.get(rid)
        if entry is not None and entry.hold is Hold.PARKED:
            entry.hold = Hold.LEAVING
            tokens = int(entry.req.kv.kv_committed_len)
            synced = min(tokens, self.host.synced(rid))
            self.tally.evicted_tokens += tokens
            self.tally.evicted_synced_tokens += synced
            is_synced = tokens - synced <= max(_LAST_TOKENS, 2 * self._scheduler.page_size)
            entry.synced_at = self._passes if is_synced else None
            self._moved(entry.req, Phase.OFFLOADED, reason)

    # ---- memory ------------------------------------------------------------------------------------

    def _keep_memory(self, batch: Any, now: float) -> None:
        """Pages for the next steps and for the prompt in hand, and rows for those admitted."""
        self.is_short = False
        if self._orders.stock:
            return
        missing = memory.missing_tokens(self._scheduler, batch, freeing=self.freeing_tokens())
        if missing > 0:
            self.is_short = True
            self._evict_for(batch, missing, now)
        queue, pool = self._scheduler.waiting_queue, self._scheduler.req_to_token_pool
        if queue and self._orders.admit and pool.available_size() == 0:
            held = memory.held_by_rank(self._held.values(), self._orders)
            parked = [e for e in held if e.hold is Hold.PARKED]
            for entry in parked[: min(_ROWS_AT_ONCE, len(self._orders.admit))]:
                self._want_off(entry.req.rid, Reason.MEMORY)

    def _evict_for(self, batch: Any, missing: int, now: float) -> None:
        for entry in memory.held_by_rank(self._held.values(), self._orders):
            if missing <= 0:
                return
            if entry.hold is Hold.PARKED:
                self._want_off(entry.req.rid, Reason.MEMORY)
                missing -= memory.private_tokens(entry.req)
                self.tally.for_memory += 1
        running = memory.running_by_rank(batch.reqs, self._orders)
        for req in running[: max(0, len(running) - 1)]:  # one goes on, whatever happens
            if missing <= 0:
                return
            self._park(batch, [req], now, reason=Reason.MEMORY)
            if req.rid in self._held:
                self._want_off(req.rid, Reason.MEMORY)
                missing -= memory.private_tokens(req)
                self.tally.for_memory += 1

    # ---- off the device and back -------------------------------------------------------------------

    def _leave(self, flying: set[Any]) -> None:
        under_way: list[Held] = []
        called_back = set() if self.is_short else {rid for rid, _ in self._orders.load}
        for entry in list(self._held.values()):
            if entry.hold is not Hold.LEAVING or entry.req in flying or entry.req.rid in called_back:
                continue
            if self._orders.stock:
                entry.hold = Hold.PARKED
                continue
            is_saved, made_room = self.host.save(entry, self._orders)
            for other in made_room:
                self.tally.made_room += 1
                self._lose(other, Reason.HOST_FULL)
            if is_saved:
                self._has_left(entry)
            elif is_saved is False:
                self.tally.dropped += 1
                self._lose(entry, Reason.HOST_FULL if self.host.wants(entry) else None)
            else:
                under_way.append(entry)
        for entry in self.host.saved_at_once(under_way):
            self._has_left(entry)

    def _has_left(self, entry: Held) -> None:
        """Its KV is in host memory, or its slots are free as if it was."""
        rows.give_up(self._scheduler, entry.req, is_saved=True)
        rows.forget_kv(entry.req)
        entry.hold = Hold.OFFLOADED
        self.tally.offloaded += 1
        if entry.synced_at is not None:
            passes = self._passes - entry.synced_at
            self.tally.synced_evictions[str(passes) if passes <= 2 else "more"] += 1

    def _lose(self, entry: Held, reason: Reason | None) -> None:
        """Its KV is gone: it waits for a prefill until a plan admits it."""
        self._to_queue(entry, reason)
        self._dropped.add(entry.req.rid)

    def _load(self, batch: Any) -> None:
        """Bring back those the plan names, in its order, as long as there is room."""
        spare = memory.reserved_tokens(self._scheduler, batch) + 2 * self._scheduler.page_size
        for rid, place in self._to_load():
            entry = self._held.get(rid)
            if entry is not None and entry.hold is Hold.LEAVING and not self.is_short:
                entry.hold = Hold.PARKED  # it is still there: back at once
                self._staying.append(rid)
            if entry is None or entry.hold is not Hold.OFFLOADED:
                continue
            host = self.host.manager
            if host is not None and host.is_writing(rid):
                continue  # on CUDA its slots were free before its copy was whole: the next step has it
            if place == Place.RECOMPUTE or host is None or host.synced(rid) < entry.req.seqlen - 1:
                self._recompute(entry)
                continue
            slots = rows.take(self._scheduler, entry.req, spare=spare)
            if slots is None and self._is_alone(entry):
                self._recompute(entry)
                continue
            if slots is None:
                self.is_short = True
                return
            self.host.loaded.pop(rid, None)
            entry.hold, entry.is_sound = Hold.LOADING, False
            self.returns.begin(rid, "loaded", self.returns.asked_at(rid, self._clock()))
            self._moved(entry.req, Phase.LOADING, None)
            if len(slots) == 0:
                self.host.loaded[rid] = True
            else:
                host.load(rid, entry.req.prefix_len, slots)

    def _to_load(self) -> Iterator[tuple[str, int]]:
        if not self._orders.stock:
            yield from self._orders.load
            return
        for rid in list(self._held):
            yield rid, int(Place.LOAD)

    def _is_alone(self, entry: Held) -> bool:
        """Nobody else holds anything whose end could make room."""
        others = any(e.req.kv.holds_kv for e in self._held.values() if e is not entry)
        scheduler = self._scheduler
        busy = scheduler.running_batch.reqs or scheduler.result_queue or scheduler.chunked_req is not None
        return not others and not busy

    def _return(self, batch: Any, flying: set[Any], now: float) -> Any:
        """Back into the batch: what was loaded, and what is to be resumed."""
        back = [entry for entry in list(self._held.values()) if self._is_loaded(entry)]
        wanted = list(self._held) if self._orders.stock else [*self._orders.resume, *self._staying]
        for rid in wanted:
            entry = self._held.get(rid)
            if entry is None or entry.hold not in (Hold.PARKED, Hold.LEAVING):
                continue
            if entry.req not in flying and entry.req.to_finish is None and entry not in back:
                back.append(entry)
        if not back:
            return batch
        batch = batches.rejoin(self._scheduler, batch, [entry.req for entry in back])
        self._batch = batch
        for entry in back:
            del self._held[entry.req.rid]
            self.tally.away_s += now - entry.since
            self.tally.came_back += 1
            if entry.hold is Hold.LOADING:
                self.tally.loaded += 1
            else:
                self.tally.resumed += 1
                self.returns.begin(entry.req.rid, "resumed", self.returns.asked_at(entry.req.rid, now))
            self._moved(entry.req, Phase.RUNNING, None)
        return batch

    def _is_loaded(self, entry: Held) -> bool:
        if entry.hold is not Hold.LOADING:
            return False
        went_well = self.host.loaded.pop(entry.req.rid, None)
        if went_well is None:
            return False
        if went_well:
            assert self.host.manager is not None
            self.host.manager.attach(entry.req.rid)
            entry.is_sound = True
            return True
        self.tally.failed_loads += 1
        self._recompute(entry)
        return False

    # ---- into the engine's queue -------------------------------------------------------------------

    def _to_queue(self, entry: Held, reason: Reason | None = None) -> None:
        """A prefill brings it back; the engine has it again."""
        scheduler, req = self._scheduler, entry.req
        if req.kv.holds_kv:
            rows.give_up(scheduler, req, is_sound=entry.is_sound)
            rows.forget_kv(req)
        self._held.pop(req.rid, None)
        limit, scheduler.max_queued_requests = scheduler.max_queued_requests, None
        try:
            scheduler._add_request_to_queue(req, is_retracted=True)
        finally:
            scheduler.max_queued_requests = limit
        self._moved(req, Phase.WAITING, reason)

    def _recompute(self, entry: Held) -> None:
        """A prefill brings it back, before anybody who has not started."""
        self.tally.recomputed += 1
        asked_at = self.returns.asked_at(entry.req.rid, self._clock())
        self.host.drop(entry.req.rid)
        self._to_queue(entry)
        self.returns.begin(entry.req.rid, "recomputed", asked_at)
        self._recomputing.append(entry.req)

    def _parked(self, rid: str) -> Any | None:
        entry = self._held.get(rid)
        return entry.req if entry is not None and entry.hold is Hold.PARKED else None

    def _prefilling(self) -> set[Any]:
        return {
            req
            for batch, _ in self._scheduler.result_queue
            if batch.forward_mode.is_extend()
            for req in batch.reqs
        }
