"""The plugin inside one scheduler process: the link, the book of streams and the view of the engine, joined.

Lives on the scheduler's thread of the rank that receives requests. Other ranks only get `TokenFlowLinkReq`.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import BaseReq

from tokenflow_engine.control.owners import Delivery, Lost, Owner, Replaced
from tokenflow_engine.control.server import LinkServer
from tokenflow_engine.control.streams import StreamBook
from tokenflow_engine.protocol import Consumption, State, StreamClosed, StreamOpened
from tokenflow_engine.sglang.view import SchedulerView, generate_requests

__all__ = ["Attachment", "TokenFlowLinkReq"]

_STATS_EVERY_S = 0.1
_COUNTS_EVERY_S = 0.03
_RECONCILE_EVERY_S = 0.5
_ABORT_AGAIN_EVERY_S = 0.1
_MAX_DELIVERIES = 256


class TokenFlowLinkReq(BaseReq, kw_only=True):  # type: ignore[call-arg,misc]  # untyped base
    """What the link changes in the engine, in the same step on every rank."""

    aborts: list[str]
    """Exact rids."""


class Attachment:
    """One per scheduler process. Nothing here blocks; errors are the guard's."""

    def __init__(self, *, view: SchedulerView, server: LinkServer) -> None:
        self._view = view
        self._server = server
        self._book = StreamBook()
        self._stats_due = self._counts_due = self._reconcile_due = self._abort_again_due = 0.0

    def detach(self) -> None:
        """Close the link for good; to gateways the plugin has gone silent."""
        self._view.stop_waking_for(self._server.for_scheduler)
        self._server.close()

    def hush(self) -> None:
        """After a failed `exchange`: do not wake an idle scheduler for it again at once."""
        self._server.for_scheduler.clear()

    # ---- once a step ------------------------------------------------------------------------------

    def exchange(self, received: list[Any]) -> TokenFlowLinkReq | None:
        """Take in what the engine and the link received; the answer is to be appended to the engine's."""
        now = time.monotonic()
        self._look(now)
        aborts = self._arrivals(received, now)
        for delivery in self._server.receive(limit=_MAX_DELIVERIES):
            aborts += self._obey(delivery, now)
        aborts += self._abort_again(now)
        self._publish(now)
        if now >= self._stats_due:
            self.refresh_stats(now)
        if self._book.is_closing:
            self._server.for_scheduler.ring()  # do not sleep before the end is confirmed
        return TokenFlowLinkReq(aborts=aborts) if aborts else None

    def refresh_stats(self, now: float) -> None:
        """Renew the statistics that the link sends."""
        self._stats_due = now + _STATS_EVERY_S
        self._server.stats = self._view.stats(generated_total=self._book.generated_total, now=now)

    # ---- what happens to requests -----------------------------------------------------------------

    def count(self, reqs: list[Any], skip: Any) -> None:
        """A step's results, before they are streamed; the counts are what the engine reports as usage."""
        now = time.monotonic()
        for req in reqs:
            if req is skip or (req.finished() and req.finished_output):
                continue
            self._book.counted(req.rid, _generated_tokens(req))
            if req.finished():
                is_abort = req.finished_reason.to_json().get("type") == "abort"
                self._book.ended(req.rid, aborted=is_abort, now=now)
        self._publish(now)

    def dropped(self, req: Any) -> None:
        """The engine ends a request outside the output stream."""
        now = time.monotonic()
        self._book.ended(req.rid, aborted=True, now=now)
        self._publish(now)

    def moved(self, reqs: list[Any], state: State) -> None:
        """Requests were queued (again) or scheduled."""
        for req in reqs:
            self._book.moved(req.rid, state)
        self._publish(time.monotonic())

    # ---- parts of a step --------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Compare the book with the engine: often while a gateway waits for a confirmation."""
        if now < self._reconcile_due and not self._book.is_closing:
            return
        self._reconcile_due = now + _RECONCILE_EVERY_S
        self._book.reconcile(self._view.held_rids(), now=now)
        self._book.forget_old(now)

    def _arrivals(self, received: list[Any], now: float) -> list[str]:
        """Enter new requests in the book; the ones that came after their stream was closed."""
        arrived = [req for entry in received for req in generate_requests(entry)]
        return [req.rid for req in arrived if not self._may_start(req, now)]

    def _may_start(self, req: Any, now: float) -> bool:
        is_warm_up = req.sampling_params.max_new_tokens == 0
        return self._book.arrived(req.rid, is_warm_up=is_warm_up, now=now)

    def _obey(self, delivery: Delivery, now: float) -> list[str]:
        owner, message = delivery
        if isinstance(message, StreamOpened):
            self._book.opened(message.rid, owner=owner, now=now, declared_rate=message.declared_rate)
        elif isinstance(message, Consumption):
            self._consumed(message, owner, now)
        elif isinstance(message, StreamClosed):
            return self._book.closed(message.rid, owner=owner, now=now)
        elif isinstance(message, Replaced):
            return self._book.replaced(message, now=now)
        elif isinstance(message, Lost):
            self._book.lost(owner, now=now)
        return []

    def _consumed(self, message: Consumption, owner: Owner, now: float) -> None:
        """Readings carry wall-clock times; the book has one clock, the monotonic one."""
        ahead_s = time.time() - now
        for reading in message.readings:
            here = msgspec.structs.replace(reading, at=reading.at - ahead_s)
            self._book.consumed(here, owner=owner, now=now)

    def _abort_again(self, now: float) -> list[str]:
        """Requests that were retracted to the waiting queue before their abort took effect."""
        if not self._book.is_closing or now < self._abort_again_due:
            return []
        self._abort_again_due = now + _ABORT_AGAIN_EVERY_S
        waiting = self._view.waiting_rids()
        return [rid for rid in self._book.closing_parts() if rid in waiting]

    def _publish(self, now: float) -> None:
        """Hand changes to the link: states at once, mere counts every few steps."""
        is_urgent = self._book.has_urgent_updates
        if is_urgent or now >= self._counts_due:
            self._counts_due = now + _COUNTS_EVERY_S
            updates = self._book.take_updates(now=now)
            if updates:
                self._server.post(updates, is_urgent=is_urgent)
        for confirmation in self._book.take_confirmations():
            self._server.confirm(confirmation)


def _generated_tokens(req: Any) -> int:
    """Tokens up to the stop condition: overlap and speculation may have sampled more."""
    made = len(req.output_ids)
    return made if req.finished_len is None else min(made, req.finished_len)
