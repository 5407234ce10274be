"""Records what every stream has used, without anybody waiting for a disk."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.store.sqlite import StoreError
from tokenflow_gateway.store.usage import USAGE_FILE, ReadOn, UsageRecord, UsageStore
from tokenflow_gateway.tenants.settings import UsageSettings

__all__ = ["UsageLog", "record_of"]

_log = structlog.stdlib.get_logger("tokenflow.usage")

_MOST_WAITING: Final = 20_000
"""Records, of some hundred bytes: what a disk that stands still may cost in memory."""
_BATCH: Final = 500
_GATHER_S: Final = 0.25
"""How long records are gathered before they are written together."""
_AGAIN_S: Final = 1.0
"""After a write that failed."""
_CLOSE_WITHIN_S: Final = 5.0
_TIDY_EVERY_S: Final = 3600.0
_DAY_S: Final = 86_400.0


def record_of(stream: Stream, *, ended: float) -> UsageRecord:
    """One stream that has come to its end at `ended` (`time.monotonic()`)."""
    tally, generated = stream.reader.tally, stream.generated
    return UsageRecord(
        rid=stream.rid,
        request_id=stream.request_id,
        at=stream.opened_at,
        tenant=stream.tenant,
        key_id=stream.grant.key_id,
        sla=stream.grant.sla.name,
        route=stream.route,
        model=stream.model,
        engine=stream.engine.name,
        end=stream.end or "failed",
        prompt=stream.prompt_tokens or 0,
        generated=generated,
        delivered=stream.delivered,
        consumed=round(min(tally.consumed, generated), 2),
        parked_s=round(stream.parked_s(ended), 3),
        stalls=tally.stalls,
        stall_s=round(tally.stall_s, 3),
        ttft_s=stream.ttft_s and round(stream.ttft_s, 4),
        duration_s=round((stream.ended or ended) - stream.started, 3),
    )


class UsageLog:
    """A bounded queue, and a thread that writes what is in it. What does not fit is dropped, and counted.

    A record that could not be written is tried again until the log is closed.
    """

    def __init__(
        self,
        state: Path,
        settings: UsageSettings,
        *,
        writer: str = "",
        on_dropped: Callable[[int], None] = lambda count: None,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        """`state`: the directory of the store; `writer`: this process's name there.

        `on_dropped` is called in any thread.
        """
        self._path = state / USAGE_FILE
        self._settings = settings
        self._writer = writer
        self._on_dropped = on_dropped
        self._most_waiting = most_waiting
        self._entries: deque[UsageRecord | ReadOn] = deque()
        self._news = threading.Event()  # there are entries, or it is time to end
        self._closing = threading.Event()
        self._failing = False
        self._tidied_at = 0.0
        self._thread = threading.Thread(target=self._write_all, name="usage", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    async def aclose(self) -> None:
        """Write what is there, in as much time as a disk that works needs."""
        self._closing.set()
        self._news.set()
        await asyncio.to_thread(self._thread.join, _CLOSE_WITHIN_S)
        self._dropped(len(self._entries))

    def ended(self, stream: Stream) -> None:
        """A stream is over, and its counts are final. Never waits."""
        if stream.end != "retried":  # nothing was done for it, and its request goes on as another stream
            self._put(record_of(stream, ended=time.monotonic()))

    def read_on(self, rid: str, track: ReaderTrack) -> None:
        """A reader is done with what they had of a stream that has ended. Never waits."""
        self._put(ReadOn(rid=rid, consumed=round(track.tally.consumed, 2)))

    # ---- inside ------------------------------------------------------------------------------------

    def _put(self, entry: UsageRecord | ReadOn) -> None:
        if len(self._entries) >= self._most_waiting:
            self._dropped(1)
            return
        self._entries.append(entry)
        if not self._news.is_set():
            self._news.set()

    def _dropped(self, count: int) -> None:
        if count:
            self._on_dropped(count)

    def _write_all(self) -> None:
        """The thread's work."""
        store: UsageStore | None = None
        waiting: list[UsageRecord | ReadOn] = []
        try:
            while not (self._closing.is_set() and not self._entries and not waiting):
                waiting = waiting or self._gather()
                try:
                    store = store or UsageStore(self._path, writer=self._writer)
                    self._write(store, waiting)
                    waiting = []
                except StoreError as error:
                    self._note_failure(error)
                    if self._closing.wait(_AGAIN_S):
                        break
        finally:
            self._dropped(len(waiting))
            if store is not None:
                store.close()

    def _gather(self) -> list[UsageRecord | ReadOn]:
        """The next entries; waits for the first, and for a moment for others."""
        self._news.wait()
        if len(self._entries) < _BATCH:
            self._closing.wait(_GATHER_S)
        self._news.clear()
        gathered = [self._entries.popleft() for _ in range(min(_BATCH, len(self._entries)))]
        if self._entries:
            self._news.set()
        return gathered

    def _write(self, store: UsageStore, entries: list[UsageRecord | ReadOn]) -> None:
        store.write(entries)
        if self._failing:
            _log.info("usage is recorded again")
        self._failing = False
        now = time.time()
        if now - self._tidied_at >= _TIDY_EVERY_S:
            self._tidied_at = now
            store.forget_before(now - self._settings.keep_days * _DAY_S)

    def _note_failure(self, error: StoreError) -> None:
        if not self._failing:
            _log.error("usage cannot be recorded now", reason=str(error))
        self._failing = True
