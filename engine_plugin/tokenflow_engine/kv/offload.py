"""KV of streams in host memory: written through while they run, loaded back when they return.

One `OffloadManager` a rank, used by the scheduler's thread only; nothing in it blocks, but that `detach` and
`drop` may wait briefly for a short copy (`Transfer.release`). A step of the scheduler:

    for done in offload.poll(): ...                  # loads to resume, failures to recompute
    offload.load(rid, 0, slots)                      # returning streams
    offload.begin_iteration(offload.budget_tokens(step_s))
    offload.write(rid, row, upto)                    # likeliest victims first
    offload.detach(rid, tokens)                      # leaving streams: True, and their slots may be freed
    offload.prepare_forward()
    # the forward pass is launched
    offload.forward_launched()

**Which slots may be reused.** Tokens below `synced(rid)` have a finished copy: their slots may be freed at
any time. Those of a stream that goes host-only, once `detach` has said True. Those of a stream that ends,
once `drop` has said True or `poll` has reported it `RELEASED`. Others are still read (or written, by a load)
by a copy.

**Tensor parallelism.** Each rank has a manager of its own, over an `AgreedTransfer`, and calls it as the
others do: then `poll`, `synced`, `detach` and the rest answer the same on all ranks, at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from tokenflow_engine.kv.copies import CopyQueue, Part
from tokenflow_engine.kv.ledger import StreamLedger
from tokenflow_engine.kv.pages import HostPages
from tokenflow_engine.kv.transfer.base import Direction, Finished, Run, Slots, Transfer

__all__ = ["Done", "Event", "OffloadManager", "OffloadStatistics"]


class Event(IntEnum):
    """What `OffloadManager.poll` reports of a stream."""

    WRITTEN = 0
    """These tokens are synced now."""
    WRITE_FAILED = 1
    """These tokens and those after them have no host copy; they may be written again if still on the device.
    After `detach`, they are lost and must be recomputed."""
    LOADED = 2
    """All tokens of a `load` are on the device: the stream may run."""
    LOAD_FAILED = 3
    """A `load` failed or its host copy was corrupt (then `synced` has fallen to the part that is sound). None
    of its tokens on the device can be relied on, and no copy touches their slots any more."""
    RELEASED = 4
    """No copy touches the device slots of a dropped stream any more."""


@dataclass(frozen=True, slots=True)
class Done:
    """One event of one stream."""

    rid: str
    event: Event
    start: int
    tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStatistics:
    """Totals since the start, and what is under way now."""

    host_tokens: int
    host_used_tokens: int
    """In whole pages."""
    host_only_streams: int
    written_bytes: int
    write_s: float
    """Copying, without waiting."""
    write_bytes_per_s: float
    """Of the last copies; 0 before the first."""
    loaded_bytes: int
    load_s: float
    load_bytes_per_s: float
    writing_tokens: int
    """Queued and in flight."""
    loading_tokens: int
    failed_writes: int
    """Copies, not tokens."""
    failed_loads: int
    corrupt_loads: int
    refused_tokens: int
    """Not written because the host pool was full."""
    reclaimed_tokens: int
    ranks_lost: bool
    """The ranks do not agree any more: nothing is copied."""


@dataclass(slots=True)
class _Load:
    start: int
    tokens: int
    left: int
    """Tokens not on the device yet."""
    in_flight: int = 0
    error: str = ""
    corrupt_at: int | None = None


@dataclass(eq=False, slots=True)
class _Stream:
    rid: str
    ledger: StreamLedger
    load: _Load | None = None
    write_error: str = ""
    dropped: bool = False
    release_due: bool = False

    @property
    def busy(self) -> bool:
        return self.ledger.writing > 0 or self.load is not None


class OffloadManager:
    """What of which stream is in host memory, and the copies that change it.

    `page_tokens` is the unit in which host memory is given out, independent of the device's pages. No more
    than about `ahead_s` seconds of copies are with the backend at a time. `common_s` makes of a time that
    this rank measured one that all ranks know; `ranks_lost` says whether they have ceased to agree. With
    `verify`, each token's host copy is checksummed when written and compared before it is loaded: slow, for
    tests of one rank.
    """

    def __init__(
        self,
        transfer: Transfer,
        *,
        page_tokens: int = 16,
        ahead_s: float = 0.02,
        common_s: Callable[[float], float] = float,
        ranks_lost: Callable[[], bool] = bool,
        verify: bool = False,
    ) -> None:
        self._transfer = transfer
        self._common_s = common_s
        self._ranks_lost = ranks_lost
        self._page_tokens = page_tokens
        self._verify = verify
        self._pages = HostPages(transfer.host_tokens // page_tokens)
        self._streams: dict[str, _Stream] = {}
        self._dropped: list[_Stream] = []
        """Those that copies in flight still touch."""
        self._writes: CopyQueue[_Stream] = CopyQueue(transfer, Direction.WRITE, ahead_s=ahead_s)
        self._loads: CopyQueue[_Stream] = CopyQueue(transfer, Direction.LOAD, ahead_s=ahead_s)
        self._budget = 0
        self._events: list[Done] = []
        self._corrupt_loads = 0
        self._refused_tokens = 0
        self._reclaimed_tokens = 0

    # ---- the step -----------------------------------------------------------------------------------

    def poll(self) -> list[Done]:
        """What has happened since the last call, and hand further queued copies to the backend."""
        for finished in self._transfer.poll():
            if finished.ticket.direction is Direction.WRITE:
                self._on_write(finished)
            else:
                self._on_load(finished)
        self._submit()
        events, self._events = self._events, []
        return events

    def begin_iteration(self, budget_tokens: int) -> None:
        """From now on `write` takes this many tokens in all, and up to a page that was left before."""
        self._budget = budget_tokens + min(self._budget, self._page_tokens)

    def budget_tokens(self, iteration_s: float) -> int:
        """Tokens that can be written within `iteration_s`, behind what is queued, at the measured rate."""
        return max(0, self._writes.tokens_within(self._common_s(iteration_s)) - self._writes.tokens)

    def prepare_forward(self) -> None:
        """Before every launch of a forward pass: what was queued goes to the backend, to run beside it.

        Sooner, if somebody waits for what these copies set free.
        """
        self._submit()

    def forward_launched(self) -> None:
        """After every launch: copies queued from now on may touch what it writes."""
        self._transfer.forward_launched()

    # ---- streams ------------------------------------------------------------------------------------

    def write(self, rid: str, row: Slots, upto: int, *, leaving: bool = False) -> int:
        """Queue the copying of the tokens below `upto` that have no host copy yet; the number taken.

        `row` holds the slots of the stream's tokens from the first one on (`req_to_token[index]`), and stays
        as it is until the tokens are synced or the stream is dropped. The forward pass that writes token
        `upto - 1` has been launched. Takes whole pages, as far as the budget and the host pool go; with
        `leaving`, the rest of the last page too and without a budget. A page begun that way is completed by
        the next write. Nothing is taken while the stream is loading, or while copies behind a failed one are
        still in flight.
        """
        stream = self._streams.get(rid) or _Stream(rid, StreamLedger(self._page_tokens))
        ledger = stream.ledger
        if stream.load is not None or ledger.failed:
            return 0
        end = self._bounded(ledger, upto, leaving=leaving)
        if end <= ledger.queued:
            return 0
        start, _ = ledger.begin_write(end, self._pages.take(ledger.pages_short(end)))
        self._streams[rid] = stream
        self._budget = max(0, self._budget - (end - start))
        self._writes.put(Part(stream, start, end, row, origin=0))
        return end - start

    def detach(self, rid: str, tokens: int) -> bool:
        """The stream leaves the device; its first `tokens` tokens shall stay in host memory.

        True: all its slots may be freed now, and it is host-only. False: not all of them are on their way, or
        copies still read its slots: `write` with `leaving`, and ask again at the next step. Where the host
        pool is full, detach with what is `synced`, or `drop`.
        """
        stream = self._streams.get(rid)
        if stream is None or stream.load is not None:
            return tokens == 0 and stream is None
        ledger = stream.ledger
        if ledger.queued < tokens or (ledger.writing and not self._may_reuse_written(stream)):
            return False
        ledger.host_only = True
        return True

    def attach(self, rid: str) -> None:
        """The stream is on the device again without a load, recomputed: its host copy is a duplicate.

        After `LOADED` it is anyway.
        """
        stream = self._streams.get(rid)
        if stream is not None:
            stream.ledger.host_only = False

    def load(self, rid: str, start: int, slots: Slots) -> None:
        """Queue the copying of tokens ``[start, start + len(slots))`` to these slots, in chunks.

        They must be synced, with nothing of the stream being written or loaded. `slots` stays as it is, and
        belongs to the load, until `LOADED` or `LOAD_FAILED`. The host copy stays: the next departure writes
        only what came after.
        """
        stream, end = self._streams[rid], start + len(slots)
        assert not stream.busy
        assert 0 <= start < end <= stream.ledger.synced
        stream.load = _Load(start, end - start, left=end - start)
        self._loads.put(Part(stream, start, end, slots, origin=start))

    def drop(self, rid: str) -> bool:
        """Forget the stream. True: its device slots may be freed now. False: once `poll` says `RELEASED`.

        Its host pages are given back when no copy touches them any more. Nothing is done for an unknown
        stream. Writes in flight are no reason to wait: what they read does not count any more.
        """
        stream = self._streams.pop(rid, None)
        if stream is None:
            return True
        stream.dropped = True
        stream.ledger.cancel_write(self._writes.cancel(stream))
        if stream.load is not None:
            self._loads.cancel(stream)
            stream.release_due = not self._may_reuse_loading(stream)
            if not stream.load.in_flight:
                stream.load = None
        self._dropped.append(stream)
        self._retire(stream)
        return not stream.release_due

    def reclaim(self, tokens: int, order: Iterable[str], *, host_only: bool = False) -> list[str]:
        """Drop host copies, in `order`, until `tokens` tokens of host memory are free; whose copies are gone.

        First those of streams that are on the device too, which costs nothing; with `host_only`, then those
        that are nowhere else: these streams must be recomputed, so none is dropped where all would not do.
        Streams with copies in flight are passed over.
        """
        known = [s for rid in dict.fromkeys(order) if (s := self._streams.get(rid)) is not None]
        candidates = [s for s in known if not s.busy]
        gone = self._drop_copies(tokens, [s for s in candidates if not s.ledger.host_only])
        only_copies = [s for s in candidates if s.ledger.host_only]
        all_of_them = self._page_tokens * sum(len(s.ledger.pages) for s in only_copies)
        if host_only and self.host_free + all_of_them >= tokens:
            gone += self._drop_copies(tokens, only_copies)
        return gone

    def _drop_copies(self, tokens: int, streams: list[_Stream]) -> list[str]:
        gone = []
        for stream in streams:
            if self.host_free >= tokens:
                break
            self._reclaimed_tokens += stream.ledger.synced
            self._pages.give_back(stream.ledger.truncate(0))
            del self._streams[stream.rid]
            gone.append(stream.rid)
        return gone

    # ---- questions ----------------------------------------------------------------------------------

    def synced(self, rid: str) -> int:
        """Tokens from the first on that host memory holds; 0 for an unknown stream."""
        stream = self._streams.get(rid)
        return stream.ledger.synced if stream is not None else 0

    def is_host_only(self, rid: str) -> bool:
        stream = self._streams.get(rid)
        return stream is not None and stream.ledger.host_only

    def is_loading(self, rid: str) -> bool:
        stream = self._streams.get(rid)
        return stream is not None and stream.load is not None

    def is_writing(self, rid: str) -> bool:
        """Copies of it to the host are queued or in flight."""
        stream = self._streams.get(rid)
        return stream is not None and stream.ledger.writing > 0

    def host_rows(self, rid: str, start: int, end: int) -> list[Run]:
        """Where in the host table these synced tokens are."""
        assert end <= self.synced(rid)
        return self._streams[rid].ledger.runs(start, end)

    @property
    def host_free(self) -> int:
        """Tokens for which the host pool has room, in whole pages."""
        return self._pages.free * self._page_tokens

    def load_s(self, tokens: float) -> float:
        """Seconds until `tokens` more are on the device, behind what is queued, at the measured rate."""
        return self._loads.seconds(tokens)

    def evict_s(self, tokens: float) -> float:
        """Seconds until `tokens` more are in host memory, behind what is queued, at the measured rate."""
        return self._writes.seconds(tokens)

    def statistics(self) -> OffloadStatistics:
        return OffloadStatistics(
            host_tokens=self._pages.pages * self._page_tokens,
            host_used_tokens=(self._pages.pages - self._pages.free) * self._page_tokens,
            host_only_streams=sum(s.ledger.host_only for s in self._streams.values()),
            written_bytes=self._writes.rate.total_bytes,
            write_s=self._writes.rate.total_s,
            write_bytes_per_s=self._writes.rate.measured_bytes_per_s,
            loaded_bytes=self._loads.rate.total_bytes,
            load_s=self._loads.rate.total_s,
            load_bytes_per_s=self._loads.rate.measured_bytes_per_s,
            writing_tokens=self._writes.tokens,
            loading_tokens=self._loads.tokens,
            failed_writes=self._writes.failed,
            failed_loads=self._loads.failed,
            corrupt_loads=self._corrupt_loads,
            refused_tokens=self._refused_tokens,
            reclaimed_tokens=self._reclaimed_tokens,
            ranks_lost=self._ranks_lost(),
        )

    def check_integrity(self) -> None:
        """Assert that watermarks, pages and copies in flight agree. For tests, and when idle."""
        streams = [*self._streams.values(), *self._dropped]
        for stream in self._streams.values():
            stream.ledger.check_integrity()
            assert not (self._verify and len(stream.ledger.digests) != stream.ledger.synced)
        self._pages.check_integrity([page for stream in streams for page in stream.ledger.pages])
        assert self._writes.tokens == sum(stream.ledger.writing for stream in streams)

    def close(self) -> None:
        """Wait for copies in flight and give the host pool back."""
        self._transfer.close()

    # ---- inside -------------------------------------------------------------------------------------

    def _bounded(self, ledger: StreamLedger, upto: int, *, leaving: bool) -> int:
        """Up to where a write may go now."""
        page = self._page_tokens
        if not leaving:
            upto = min(upto, ledger.queued + self._budget) // page * page
        if ledger.pages_short(upto) <= self._pages.free:
            return upto
        room = (len(ledger.pages) + self._pages.free) * page
        self._refused_tokens += upto - max(room, ledger.queued)
        return room

    def _may_reuse_written(self, stream: _Stream) -> bool:
        """Whether all copies that read its slots are on their way, and reuse comes after them."""
        if stream.ledger.failed or self._writes.is_waiting(stream):
            return False
        ticket = self._writes.last_in_flight(stream)
        return ticket is not None and self._transfer.release(ticket)

    def _may_reuse_loading(self, stream: _Stream) -> bool:
        """Whether the slots of a load that is given up may be reused at once."""
        ticket = self._loads.last_in_flight(stream)
        return ticket is None or self._transfer.release(ticket)

    def _submit(self) -> None:
        while chunk := self._writes.next_chunk():
            self._writes.submit(chunk, _host_rows(chunk))
        while chunk := self._loads.next_chunk():
            sound = [part for part in chunk if not self._verify or self._is_sound(part)]
            for part in sound:
                assert part.owner.load is not None
                part.owner.load.in_flight += part.tokens
            if sound:
                self._loads.submit(sound, _host_rows(sound))

    def _on_write(self, finished: Finished) -> None:
        for part in self._writes.finish(finished):
            stream, ledger = part.owner, part.owner.ledger
            if finished.error is not None:
                stream.write_error = stream.write_error or finished.error
                ledger.cancel_write(part.tokens + self._writes.cancel(stream))
            elif ledger.finish_write(part.start, part.end):
                self._keep_digests(part)
                self._report(stream, Event.WRITTEN, part.start, part.tokens)
            if ledger.failed and not ledger.writing:
                self._settle(stream)
            self._retire(stream)

    def _settle(self, stream: _Stream) -> None:
        """The last copy behind a failed one has come in: the stream can be written again."""
        ledger = stream.ledger
        lost = ledger.queued - ledger.synced
        self._report(stream, Event.WRITE_FAILED, ledger.synced, lost, stream.write_error)
        stream.write_error = ""
        self._pages.give_back(ledger.settle())

    def _on_load(self, finished: Finished) -> None:
        for part in self._loads.finish(finished):
            stream, load = part.owner, part.owner.load
            assert load is not None
            load.in_flight -= part.tokens
            load.left -= part.tokens
            if finished.error is not None and not load.error:
                load.error = finished.error
                self._loads.cancel(stream)
            self._end_load(stream, load)

    def _is_sound(self, part: Part[_Stream]) -> bool:
        """Compare what is about to be loaded with what was written; a difference fails the load."""
        ledger, load = part.owner.ledger, part.owner.load
        assert load is not None
        for token, digest in enumerate(self._digests(part), part.start):
            if digest != ledger.digests[token]:
                self._corrupt_loads += 1
                load.error, load.corrupt_at = f"the host copy of token {token} is corrupt", token
                self._loads.cancel(part.owner)
                self._end_load(part.owner, load)
                return False
        return True

    def _end_load(self, stream: _Stream, load: _Load) -> None:
        if load.in_flight or (load.left and not load.error and not stream.dropped):
            return
        stream.load = None
        if load.error:
            if load.corrupt_at is not None:
                self._pages.give_back(stream.ledger.truncate(load.corrupt_at))
            self._report(stream, Event.LOAD_FAILED, load.start, load.tokens, load.error)
        else:
            stream.ledger.host_only = False
            self._report(stream, Event.LOADED, load.start, load.tokens)
        self._retire(stream)

    def _retire(self, stream: _Stream) -> None:
        """Give the pages of a dropped stream back if nothing touches them any more."""
        if not stream.dropped or stream.busy:
            return
        self._dropped.remove(stream)
        self._pages.give_back(stream.ledger.pages)
        stream.ledger.pages = []
        if stream.release_due:
            self._events.append(Done(stream.rid, Event.RELEASED, 0, 0))

    def _report(self, stream: _Stream, event: Event, start: int, tokens: int, error: str = "") -> None:
        if not stream.dropped:
            self._events.append(Done(stream.rid, event, start, tokens, error))

    def _keep_digests(self, part: Part[_Stream]) -> None:
        if self._verify:
            part.owner.ledger.digests += self._digests(part)

    def _digests(self, part: Part[_Stream]) -> list[int]:
        runs = part.owner.ledger.runs(part.start, part.end)
        return [digest for run in runs for digest in self._transfer.digests(run)]


def _host_rows(chunk: list[Part[_Stream]]) -> list[Run]:
    return [run for part in chunk for run in part.owner.ledger.runs(part.start, part.end)]
