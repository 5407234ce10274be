"""The plugin inside one scheduler process: link, book of streams, plans and the view of the engine, joined.

Lives on the scheduler's thread of the rank that receives requests. Other ranks only get `TokenFlowLinkReq`.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import BaseReq

from tokenflow_engine.control.orders import Orders
from tokenflow_engine.control.owners import Delivery, Lost, Owner, Replaced
from tokenflow_engine.control.parts import ALL_PARTS
from tokenflow_engine.control.server import LinkServer
from tokenflow_engine.control.streams import StreamBook
from tokenflow_engine.policy.base import Phase, Reason
from tokenflow_engine.policy.fcfs import FCFS
from tokenflow_engine.protocol import Consumption, SetPolicy, State, StreamClosed, StreamOpened
from tokenflow_engine.sglang import policies
from tokenflow_engine.sglang.costs import MeasuredCosts
from tokenflow_engine.sglang.executor import Executor
from tokenflow_engine.sglang.guard import guarded
from tokenflow_engine.sglang.outside import Outside
from tokenflow_engine.sglang.planner import Planner
from tokenflow_engine.sglang.statistics import engine_stats
from tokenflow_engine.sglang.table import Table
from tokenflow_engine.sglang.view import SchedulerView, generate_requests

__all__ = ["Attachment", "TokenFlowLinkReq"]

_logger = logging.getLogger(__name__)

_STATS_EVERY_S = 0.2
_COUNTS_EVERY_S = 0.2
_RECONCILE_EVERY_S = 0.5
_ABORT_AGAIN_EVERY_S = 0.1
_MAX_DELIVERIES = 256
_UNEXPECTED_S = 0.3

_OFFLOADED = (Phase.OFFLOADED, Phase.LOADING)
_STATES: dict[Phase, State] = {
    Phase.WAITING: "waiting",
    Phase.PREFILLING: "running",
    Phase.RUNNING: "running",
    Phase.PARKED: "parked",
    Phase.OFFLOADED: "parked",
    Phase.LOADING: "parked",
}


class TokenFlowLinkReq(BaseReq, kw_only=True):  # type: ignore[call-arg,misc]  # untyped base
    """What the link and the plan change in the engine, in the same step on every rank."""

    aborts: list[str]
    """Exact rids."""
    orders: Orders | None = None
    """New ones; None leaves those that stand."""
    open_host: bool = False
    """Whether to take host memory for KV; all ranks do, or none."""


class Attachment:
    """One per scheduler process. Nothing here blocks; errors are the guard's."""

    def __init__(
        self, *, view: SchedulerView, server: LinkServer, executor: Executor, costs: MeasuredCosts
    ) -> None:
        self._view = view
        self._server = server
        self._executor = executor
        self._book = StreamBook()
        self._table = Table(
            may_park=view.may_park, shared_tokens=view.shared_tokens, synced_tokens=executor.host.synced
        )
        self._planner = Planner(
            FCFS(), table=self._table, costs=costs, device=self._device, readers=self._book
        )
        self._outside = Outside(self._book.reader, self._why)
        self._parts = ALL_PARTS
        self._wants_host = False
        self._stats_due = self._counts_due = self._reconcile_due = self._abort_again_due = 0.0
        self._use(policies.policy_at_start())

    def detach(self) -> None:
        """Close the link for good; to gateways the plugin has gone silent."""
        self._view.stop_waking_for(self._server.for_scheduler)
        self._server.close()

    def hush(self) -> None:
        """After a failed `exchange`: do not wake an idle scheduler for it again at once."""
        self._server.for_scheduler.clear()

    def fall_back(self) -> None:
        """After an error while orders were carried out: first come, first served for a while."""
        self._planner.failed(time.monotonic())

    # ---- once a step ------------------------------------------------------------------------------

    def exchange(self, received: list[Any]) -> TokenFlowLinkReq | None:
        """Take in what the engine and the link received; the answer is to be appended to the engine's."""
        now = time.monotonic()
        self._look(now)
        aborts = self._arrivals(received, now)
        for delivery in self._server.receive(limit=_MAX_DELIVERIES):
            aborts += self._obey(delivery, now) or ()  # one that fails costs itself alone
        aborts += self._abort_again(now)
        orders = self._plan(now)
        self._publish(now)
        if now >= self._stats_due:
            self._refresh_stats(now)
        if self._book.is_closing:
            self._server.for_scheduler.ring()  # do not sleep before the end is confirmed
        open_host, self._wants_host = self._wants_host, False
        if not (aborts or open_host or orders is not None):
            return None
        return TokenFlowLinkReq(aborts=aborts, orders=orders, open_host=open_host)

    def about_to_sleep(self) -> None:
        """There is nothing to do until something is received: the link is told how things are."""
        now = time.monotonic()
        self._publish(now)
        self._refresh_stats(now)

    def _refresh_stats(self, now: float) -> None:
        """Renew the statistics that the link sends."""
        self._stats_due = now + _STATS_EVERY_S
        seen = msgspec.structs.replace(
            self._view.stats(generated_total=self._book.generated_total, now=now),
            waiting_by=self._book.classes(self._view.waiting_rids()),
            started_total=self._book.started_total,
        )
        self._outside.look(now)
        self._server.stats = engine_stats(
            seen, executor=self._executor, planner=self._planner, outside=self._outside
        )

    # ---- what happens to requests -----------------------------------------------------------------

    def count(self, reqs: list[Any], skip: Any) -> None:
        """A step's results, before they are streamed; the counts are what the engine reports as usage."""
        now = time.monotonic()
        for req in reqs:
            if req is skip or (req.finished() and req.finished_output):
                continue
            generated = _generated_tokens(req)
            self._book.counted(req.rid, generated)
            self._table.counted(req.rid, generated)
            if req.finished():
                is_abort = req.finished_reason.to_json().get("type") == "abort"
                self._ended(req.rid, aborted=is_abort, now=now)

    def dropped(self, req: Any) -> None:
        """The engine ends a request outside the output stream."""
        self._ended(req.rid, aborted=True, now=time.monotonic())

    def queued(self, req: Any, *, again: bool) -> None:
        """A request enters the waiting queue, after its arrival or because the engine took it back."""
        self._table.known(req)
        if again:
            self.moved(req, Phase.WAITING, None)

    def prefilled(self, reqs: list[Any], chunked: Any) -> None:
        """A pass computes these prompts, or a part of `chunked`'s."""
        for req in reqs:
            self.moved(req, Phase.PREFILLING if req is chunked else Phase.RUNNING, None)

    def moved(self, req: Any, phase: Phase, reason: Reason | None) -> None:
        """A request changed its place."""
        now = time.monotonic()
        self._book.moved(req.rid, _STATES[phase], offloaded=phase in _OFFLOADED)
        if self._table.moved(req.rid, phase, now=now, reason=reason) and phase is Phase.WAITING:
            self._planner.note()  # the rest is what a plan wanted
        if phase is Phase.RUNNING:
            self._outside.back(req.rid, now)
        elif phase is not Phase.PREFILLING:
            self._outside.left(req.rid, now)

    # ---- parts of a step --------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Compare the book with the engine: often while a gateway waits for a confirmation."""
        if now < self._reconcile_due and not self._book.is_closing:
            return
        self._reconcile_due = now + _RECONCILE_EVERY_S
        held = self._view.held_rids()
        self._book.reconcile(held, now=now)
        self._table.reconcile(held)
        self._outside.reconcile(held)
        if not isinstance(self._planner.policy, FCFS) and self._view.why_fixed is not None:
            self._use(FCFS.name)  # a storage was attached to HiCache since
        self._book.forget_old(now)

    def _arrivals(self, received: list[Any], now: float) -> list[str]:
        """Enter new requests in the book; the ones that came after their stream was closed."""
        arrived = [req for entry in received for req in generate_requests(entry)]
        return [req.rid for req in arrived if not self._may_start(req, now)]

    def _may_start(self, req: Any, now: float) -> bool:
        wanted, prompt = req.sampling_params.max_new_tokens, len(req.input_ids or ())
        self._table.arrived(req.rid, prompt=prompt, max_output=wanted or 0, now=now)
        self._planner.arrived(req.rid, prompt=prompt, now=now)
        return self._book.arrived(req.rid, is_warm_up=wanted == 0, now=now)

    @guarded("message")
    def _obey(self, delivery: Delivery, now: float) -> list[str]:
        owner, message = delivery
        if not isinstance(message, StreamOpened | Consumption):
            self._planner.note()
        if isinstance(message, StreamOpened):
            is_here = self._book.opened(
                message.rid, owner=owner, now=now, declared_rate=message.declared_rate, opening=message
            )
            if is_here:
                self._planner.note()
        elif isinstance(message, Consumption):
            self._consumed(message, owner, now)
        elif isinstance(message, StreamClosed):
            return self._book.closed(message.rid, owner=owner, now=now)
        elif isinstance(message, Replaced):
            return self._book.replaced(message, now=now)
        elif isinstance(message, Lost):
            self._book.lost(owner, now=now)
        elif isinstance(message, SetPolicy):
            self._use(message.policy)
        return []

    def _consumed(self, message: Consumption, owner: Owner, now: float) -> None:
        """Readings carry wall-clock times; the book has one clock, the monotonic one.

        A plan depends on those that say something unexpected: a pause, or a position that is not near where
        the reader was thought to be.
        """
        ahead_s = time.time() - now
        for reading in message.readings:
            paused = reading.paused and self._parts.pauses
            here = msgspec.structs.replace(reading, at=reading.at - ahead_s, paused=paused)
            before = self._book.reader(here.rid, now)
            self._book.consumed(here, owner=owner, now=now)
            after = self._book.reader(here.rid, now)
            moved_s = abs(after.buffered - before.buffered) / max(after.rate, 1e-6)
            if after.paused != before.paused or moved_s > _UNEXPECTED_S:
                self._planner.note()

    def _abort_again(self, now: float) -> list[str]:
        """Requests that were retracted to the waiting queue before their abort took effect."""
        if not self._book.is_closing or now < self._abort_again_due:
            return []
        self._abort_again_due = now + _ABORT_AGAIN_EVERY_S
        waiting = self._view.waiting_rids()
        return [rid for rid in self._book.closing_parts() if rid in waiting]

    def _publish(self, now: float) -> None:
        """Hand changes to the link: states at the next step, what is not urgent every few steps."""
        is_urgent = self._book.has_urgent_updates
        if is_urgent or now >= self._counts_due:
            self._counts_due = now + _COUNTS_EVERY_S
            updates = self._book.take_updates(now=now, reason=self._why)
            if updates:
                self._server.post(updates, is_urgent=is_urgent)
        for confirmation in self._book.take_confirmations():
            self._server.confirm(confirmation)

    def _ended(self, rid: str, *, aborted: bool, now: float) -> None:
        self._outside.back(rid, now)
        self._book.ended(rid, aborted=aborted, now=now)
        self._table.ended(rid)
        if not self._table.all_run:
            self._planner.note()  # its place is for somebody else

    # ---- plans ------------------------------------------------------------------------------------

    def _plan(self, now: float) -> Orders | None:
        if self._view.is_paused:
            return None
        if self._executor.is_short:
            self._planner.note()
        orders = self._planner.orders(now)
        news, self._planner.news = self._planner.news, []
        for rid in news:
            self._book.touched(rid)
        if orders is not None and self._parts != orders.parts:
            return msgspec.structs.replace(orders, parts=self._parts)
        return orders

    def _use(self, spelling: str) -> None:
        """Schedule by this policy (see `policies.named`), where this engine's streams can be preempted."""
        try:
            policy, parts = policies.named(spelling)
        except ValueError as error:
            _logger.warning("TokenFlow: %s; %r stays in force", error, self._planner.policy.name)
            return
        why_not = self._view.why_fixed
        if why_not is not None and not isinstance(policy, FCFS):
            line = "TokenFlow: policy %r is not used: with %s no stream can be preempted"
            _logger.warning(line, spelling, why_not)
            return
        if not isinstance(policy, FCFS):
            self._wants_host = True
        self._parts = parts
        self._planner.use(policy)
        _logger.info("TokenFlow: scheduling by policy %r", spelling)

    def _device(self) -> Any:
        return self._view.device(host_free=self._executor.host.free)

    def _why(self, rid: str) -> str | None:
        reason = self._table.reason(rid)
        return None if reason is None else reason.name.lower()


def _generated_tokens(req: Any) -> int:
    """Tokens up to the stop condition: overlap and speculation may have sampled more."""
    made = len(req.output_ids)
    return made if req.finished_len is None else min(made, req.finished_len)
