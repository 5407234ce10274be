"""Random lives of streams: nothing is lost, mixed up or leaked, whatever the order of copies and failures."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.memory_transfer import MemoryTransfer
from tokenflow_engine.kv.ledger import StreamLedger
from tokenflow_engine.kv.offload import Event, OffloadManager
from tokenflow_engine.kv.pages import HostPages
from tokenflow_engine.kv.transfer.base import Direction, Finished, Run

SLOTS, HOST_TOKENS = 60, 48
RIDS = ["a", "b", "c"]


class Engine:
    """A small engine: slots that hold ``(stream, life, token)``; streams that run, leave, return, and end."""

    def __init__(
        self, manager: type[OffloadManager] = OffloadManager, *, page_tokens: int, ordered: bool
    ) -> None:
        self.transfer = MemoryTransfer(slots=SLOTS, host_tokens=HOST_TOKENS, chunk_tokens=5, ordered=ordered)
        self.offload = manager(self.transfer, page_tokens=page_tokens, verify=True)
        self.free = list(range(SLOTS))
        self.rows: dict[str, list[int]] = {}
        """Of streams on the device."""
        self.parked: dict[str, int] = {}
        """Tokens of streams that are host-only."""
        self.loading: dict[str, list[int]] = {}
        self.leaving: set[str] = set()
        self.releasing: dict[str, list[int]] = {}
        self.life = dict.fromkeys(RIDS, 0)
        self.seen: Counter[Event] = Counter()

    def append(self, rid: str, tokens: int) -> None:
        """Start the stream, or run it on."""
        if rid in self.parked or rid in self.loading or rid in self.leaving or rid in self.releasing:
            return
        row = self.rows.setdefault(rid, [])
        for _ in range(min(tokens, len(self.free))):
            self._occupy(self.free.pop(0), (rid, self.life[rid], len(row)), row)

    def write(self, rid: str, budget: int) -> None:
        if rid in self.rows:
            self.offload.begin_iteration(budget)
            self.offload.write(rid, self.rows[rid], len(self.rows[rid]))

    def leave(self, rid: str, _: int) -> None:
        """Every step until it is off the device."""
        row = self.rows.get(rid)
        if not row:
            return
        self.leaving.add(rid)
        self.offload.write(rid, row, len(row), leaving=True)
        if self.offload.detach(rid, len(row)):
            self._free(self.rows.pop(rid))
            self.leaving.discard(rid)
            self.parked[rid] = len(row)

    def come_back(self, rid: str, start: int) -> None:
        tokens = self.parked.get(rid, 0)
        if not tokens or self.offload.is_writing(rid) or len(self.free) < tokens:
            return
        start = min(start, tokens - 1)
        del self.parked[rid]
        row: list[int] = []
        for token in range(tokens):
            self._occupy(self.free.pop(0), (rid, self.life[rid], token) if token < start else None, row)
        self.loading[rid] = row
        self.offload.load(rid, start, row[start:])

    def end(self, rid: str, _: int) -> None:
        if rid in self.releasing:
            return
        self.parked.pop(rid, None)
        self.leaving.discard(rid)
        slots = self.rows.pop(rid, []) + self.loading.pop(rid, [])
        self.life[rid] += 1
        if self.offload.drop(rid):
            self._free(slots)
        else:
            self.releasing[rid] = slots

    def hand_over(self, _: str, __: int) -> None:
        self.offload.prepare_forward()

    def finish_write(self, _: str, __: int) -> None:
        self._finish(Direction.WRITE)

    def finish_load(self, _: str, __: int) -> None:
        self._finish(Direction.LOAD)

    def fail(self, _: str, direction: int) -> None:
        self._finish(Direction(direction % 2), error="no")

    def reclaim(self, rid: str, tokens: int) -> None:
        host_only = tokens % 2 == 0
        order = [rid, *RIDS]
        for gone in self.offload.reclaim(4 * tokens, order, host_only=host_only):
            assert host_only or gone not in self.parked
            self.parked.pop(gone, None)

    def poll(self, _: str, __: int) -> None:
        for done in self.offload.poll():
            self.seen[done.event] += 1
            if done.event is Event.LOADED:
                self.rows[done.rid] = self.loading.pop(done.rid)
            elif done.event is Event.LOAD_FAILED:
                self._free(self.loading.pop(done.rid))
                self.parked[done.rid] = self.offload.synced(done.rid)
            elif done.event is Event.RELEASED:
                self._free(self.releasing.pop(done.rid))
            elif done.event is Event.WRITE_FAILED and done.rid in self.parked:
                self.parked[done.rid] = self.offload.synced(done.rid)

    def check(self) -> None:
        """Streams on the device have their own KV, and what is synced is in host memory."""
        for rid, row in self.rows.items():
            assert [self.transfer.device[slot] for slot in row] == self._kv(rid, len(row))
        for rid in RIDS:
            synced = self.offload.synced(rid)
            runs = self.offload.host_rows(rid, 0, synced) if synced else []
            rows = [run.row + n for run in runs for n in range(run.tokens)]
            assert [self.transfer.host[row] for row in rows] == self._kv(rid, synced)
        self.offload.check_integrity()

    def end_all(self) -> None:
        """Nothing is left over, on either side."""
        for rid in RIDS:
            self.end(rid, 0)
        for _ in range(30):
            self.offload.prepare_forward()
            self.transfer.finish_all()
            self.poll("", 0)
        assert not self.releasing
        assert sorted(self.free) == list(range(SLOTS))
        statistics = self.offload.statistics()
        assert statistics.host_used_tokens == statistics.writing_tokens == statistics.loading_tokens == 0

    def _kv(self, rid: str, tokens: int) -> list[object]:
        return [(rid, self.life[rid], token) for token in range(tokens)]

    def _finish(self, direction: Direction, error: str | None = None) -> None:
        if self.transfer.in_flight(direction):
            self.transfer.finish(direction, error=error)

    def _occupy(self, slot: int, value: object, row: list[int]) -> None:
        self.transfer.device[slot] = value
        row.append(slot)

    def _free(self, slots: list[int]) -> None:
        """Whoever gets them next overwrites them at once."""
        for slot in slots:
            self.transfer.device[slot] = "another stream's"
        self.free += slots


OFTEN = [
    Engine.append,
    Engine.leave,
    Engine.come_back,
    Engine.hand_over,
    Engine.finish_write,
    Engine.finish_load,
]
RARELY = [Engine.end, Engine.fail, Engine.reclaim]
ACTS = [*OFTEN * 3, Engine.write, Engine.write, *RARELY, *[Engine.poll] * 4]


def live(engine: Engine, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    for _ in range(300):
        chance.choice(ACTS)(engine, chance.choice(RIDS), chance.randrange(12))
        engine.check()
    engine.end_all()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_random_lives(page_tokens: int, ordered: bool) -> None:
    seen: Counter[Event] = Counter()

    @given(st.integers(0, 2**32))
    @settings(max_examples=60)
    def run(seed: int) -> None:
        engine = Engine(page_tokens=page_tokens, ordered=ordered)
        live(engine, seed)
        seen.update(engine.seen)

    run()
    assert all(seen[event] > 5 for event in Event if not (ordered and event is Event.RELEASED)), seen


class DetachesEarly(OffloadManager):
    def detach(self, rid: str, tokens: int) -> bool:
        super().detach(rid, tokens)
        return self._streams[rid].ledger.queued >= tokens


class ReleasesEarly(OffloadManager):
    def drop(self, rid: str) -> bool:
        super().drop(rid)
        return True


class TrustsFailedCopies(OffloadManager):
    def _on_write(self, finished: Finished) -> None:
        super()._on_write(dataclasses.replace(finished, error=None))


@pytest.mark.parametrize("faulty", [DetachesEarly, ReleasesEarly, TrustsFailedCopies])
def test_faults_are_found(faulty: type[OffloadManager]) -> None:
    """The random lives can tell a manager that is wrong."""
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(60):
            live(Engine(faulty, page_tokens=1, ordered=False), seed)


def test_runs_join_adjacent_pages() -> None:
    ledger = StreamLedger(4)
    ledger.begin_write(14, [5, 6, 2, 3])
    assert ledger.runs(2, 14) == [Run(22, 6), Run(8, 6)]
    assert ledger.runs(5, 6) == [Run(25, 1)]


def test_pages_are_given_out_side_by_side() -> None:
    pages = HostPages(8)
    assert pages.take(3) == [0, 1, 2]
    pages.give_back([1, 2])
    assert pages.take(3) == [1, 2, 3]
    pages.check_integrity([0, 1, 2, 3])


def test_page_given_back_twice_is_noticed() -> None:
    pages = HostPages(4)
    taken = pages.take(2)
    pages.give_back(taken)
    pages.give_back(taken)
    with pytest.raises(AssertionError):
        pages.check_integrity([])
