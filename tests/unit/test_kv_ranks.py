"""Tensor-parallel ranks, simulated: each with copies of its own speed and failures, all in the same state.

Every rank is a thread with an `OffloadManager` over lists; the reduction between them is a barrier. What is
compared is all that a scheduler could base a decision on, after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.memory_transfer import MemoryTransfer
from support.ranks import Reduction, SlowTransfer
from tokenflow_engine.kv.offload import Event, OffloadManager
from tokenflow_engine.kv.transfer.agreed import FAILED, AgreedTransfer, Lowest
from tokenflow_engine.kv.transfer.base import Transfer

RANKS = 3
STEPS = 250
RIDS = ["a", "b", "c", "d"]
SLOTS = 400


class Rank:
    """One rank's manager, doing what all are told, while its own copies take their time and fail."""

    def __init__(self, number: int, seed: int, wrap: Callable[[Transfer], AgreedTransfer]) -> None:
        self.number = number
        self.copies = SlowTransfer(
            random.Random(f"{seed} {number}"),  # noqa: S311 - not for secrets
            slots=SLOTS,
            host_tokens=128,
        )
        self.transfer = wrap(self.copies)
        self.offload = OffloadManager(
            self.transfer,
            page_tokens=4,
            common_s=self.transfer.common_s,
            ranks_lost=lambda: self.transfer.is_lost,
        )
        self.rows: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.leaving: set[str] = set()
        self.loading: dict[str, list[int]] = {}
        self.seen: list[Event] = []

    def run(self, seed: int, act: Callable[[Rank, int], None] = lambda _rank, _step: None) -> list[Any]:
        """The state after every step."""
        plan = random.Random(seed)  # noqa: S311 - the same on all ranks
        history = []
        for step in range(STEPS):
            act(self, step)
            self.copies.let_happen()
            history.append((self.poll(), *self.step(plan)))
            self.offload.check_integrity()
        return history

    def poll(self) -> list[tuple[str, int]]:
        done = self.offload.poll()
        for event in done:
            self.seen.append(event.event)
            if event.event in (Event.LOADED, Event.LOAD_FAILED):
                slots = self.loading.pop(event.rid)
                loaded = [self.copies.device[slot] for slot in slots]
                assert event.event is Event.LOAD_FAILED or loaded == slots, "loaded, but not on this rank"
        return [(event.rid, int(event.event)) for event in done]

    def step(self, plan: random.Random) -> tuple[Any, ...]:
        """What a scheduler does, decided by `plan` and by what the manager answers."""
        offload, answers = self.offload, []
        rid = plan.choice(RIDS)
        what, how_much = (
            plan.choice(["grow", "grow", "leave", "load", "drop", "reclaim"]),
            plan.randrange(1, 24),
        )
        if what == "grow" and self.is_running(rid):
            self.lengths[rid] = min(60, self.lengths.get(rid, 0) + how_much)
            self.compute(rid)
        elif what == "leave" and rid in self.lengths and rid not in self.loading:
            self.leaving.add(rid)
        elif what == "load" and offload.is_host_only(rid) and not offload.is_writing(rid):
            if rid not in self.loading and offload.synced(rid):
                self.loading[rid] = self.row(rid)[: offload.synced(rid)]
                offload.load(rid, 0, self.loading[rid])
        elif what == "drop" and how_much < 6:
            answers.append(offload.drop(rid))
            self.leaving.discard(rid)
            self.lengths.pop(rid, None)
            self.loading.pop(rid, None)
        elif what == "reclaim":
            gone = offload.reclaim(how_much, RIDS, host_only=how_much % 2 == 0)
            answers += gone
            for name in gone:
                self.compute(name)
        for name in sorted(self.leaving):
            tokens = self.lengths[name]
            answers.append(offload.write(name, self.row(name), tokens, leaving=True))
            if offload.detach(name, tokens):
                self.leaving.discard(name)
                answers.append(name)
                self.overwrite(name)
        own_pace_s = 0.01 * (1 + self.copies.dice.random())
        offload.begin_iteration(offload.budget_tokens(own_pace_s))
        for name in sorted(self.lengths):
            if self.is_running(name):
                answers.append(offload.write(name, self.row(name), self.lengths[name]))
        offload.prepare_forward()
        return (answers, self.state())

    def is_running(self, rid: str) -> bool:
        return not (self.offload.is_host_only(rid) or rid in self.loading or rid in self.leaving)

    def compute(self, rid: str) -> None:
        """Its KV is on the device: of each slot, the slot's number."""
        for slot in self.row(rid)[: self.lengths[rid]]:
            self.copies.device[slot] = slot

    def overwrite(self, rid: str) -> None:
        """Its slots belong to others."""
        for slot in self.row(rid):
            self.copies.device[slot] = None

    def row(self, rid: str) -> list[int]:
        first = 100 * RIDS.index(rid)
        return list(range(first, first + 60))

    def state(self) -> list[Any]:
        offload = self.offload
        streams = [
            (r, offload.synced(r), offload.is_host_only(r), offload.is_loading(r), offload.is_writing(r))
            for r in RIDS
        ]
        return [streams, offload.host_free, offload.statistics(), offload.evict_s(10), offload.load_s(10)]


def run_all(
    seed: int, wrap: type[AgreedTransfer], act: Callable[[Rank, int], None] | None = None
) -> tuple[list[Rank], list[list[Any]], Reduction]:
    reduction = Reduction(RANKS)
    ranks = [Rank(n, seed, lambda transfer: wrap(transfer, reduction.lowest)) for n in range(RANKS)]

    def run(rank: Rank) -> list[Any]:
        try:
            return rank.run(seed, *([act] if act else []))
        except BaseException:
            reduction.stop()
            raise

    with ThreadPoolExecutor(RANKS) as threads:
        histories = list(threads.map(run, ranks))
    return ranks, histories, reduction


@pytest.mark.parametrize("seed", range(12))
def test_ranks_of_any_speed_are_in_the_same_state_at_every_step(seed: int) -> None:
    ranks, histories, _ = run_all(seed, AgreedTransfer)
    for step, states in enumerate(zip(*histories, strict=True)):
        assert all(state == states[0] for state in states), f"step {step}"
    assert {Event.WRITTEN, Event.WRITE_FAILED, Event.LOADED} <= set(ranks[0].seen)
    assert not any(rank.offload.statistics().ranks_lost for rank in ranks)


class Unheard(AgreedTransfer):
    """Each rank goes by its own copies."""

    def __init__(self, transfer: Transfer, _lowest: Lowest) -> None:
        super().__init__(transfer, lambda values: values)


def test_without_agreement_their_states_differ() -> None:
    _, histories, _ = run_all(1, Unheard)
    assert histories[0] != histories[1]


class Fastest(AgreedTransfer):
    """What is over on one rank counts on all."""

    def __init__(self, transfer: Transfer, lowest: Lowest) -> None:
        super().__init__(transfer, lambda values: [-value for value in lowest([-value for value in values])])


def test_with_the_fastest_rank_deciding_streams_run_on_kv_that_is_not_there() -> None:
    with pytest.raises(AssertionError, match="not on this rank"):
        for seed in range(10):
            run_all(seed, Fastest)


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_whose_backend_breaks_costs_the_copies_of_all_at_the_same_step(seed: int) -> None:
    def break_one(rank: Rank, step: int) -> None:
        if step == STEPS // 2:
            rank.copies.broken = rank.number == 1
            rank.seen.clear()

    ranks, histories, _ = run_all(seed, AgreedTransfer, break_one)
    for step, states in enumerate(zip(*histories, strict=True)):
        assert all(state == states[0] for state in states), f"step {step}"
    for rank in ranks:
        assert rank.offload.statistics().ranks_lost
        assert rank.copies.closed
        assert Event.WRITE_FAILED in rank.seen
        assert Event.LOADED not in rank.seen


def test_a_rank_that_does_not_answer_costs_the_copies_alone() -> None:
    """Streams that were being loaded are reported, and none is ever taken for saved again."""
    answers = {"come": True}

    def lowest(values: list[int]) -> list[int]:
        if not answers["come"]:
            raise TimeoutError("rank 1 does not answer")
        return values

    copies = MemoryTransfer(slots=SLOTS, host_tokens=128)
    offload = OffloadManager(AgreedTransfer(copies, lowest), page_tokens=4)
    row = list(range(16))
    offload.write("a", row, 8, leaving=True)
    offload.prepare_forward()
    copies.finish_all()
    offload.poll()
    assert offload.detach("a", 8)
    offload.load("a", 0, row[:8])
    offload.write("b", row[8:], 8, leaving=True)
    offload.prepare_forward()
    answers["come"] = False
    assert {done.event for done in offload.poll()} == {Event.LOAD_FAILED, Event.WRITE_FAILED}
    assert copies.closed
    offload.write("b", row[8:], 8, leaving=True)
    offload.prepare_forward()
    (again,) = offload.poll()
    assert again.event is Event.WRITE_FAILED
    assert "do not agree" in again.error


def test_with_nothing_in_flight_the_ranks_do_not_talk() -> None:
    calls: list[list[int]] = []

    def lowest(values: list[int]) -> list[int]:
        calls.append(values)
        return values

    copies = MemoryTransfer(slots=SLOTS, host_tokens=128)
    offload = OffloadManager(AgreedTransfer(copies, lowest), page_tokens=4)
    for _ in range(10):
        offload.poll()
        offload.prepare_forward()
    assert calls == []
    offload.write("a", list(range(8)), 8, leaving=True)
    offload.prepare_forward()
    offload.poll()
    assert len(calls) == 1
    copies.finish_all()
    offload.poll()
    assert len(calls) == 2
    offload.poll()
    assert len(calls) == 2


def test_a_copy_that_fails_elsewhere_fails_here() -> None:
    copies = MemoryTransfer(slots=SLOTS, host_tokens=128)
    offload = OffloadManager(AgreedTransfer(copies, lambda values: [values[0], FAILED]), page_tokens=4)
    offload.write("a", list(range(8)), 8, leaving=True)
    offload.prepare_forward()
    copies.finish_all()
    (done,) = offload.poll()
    assert (done.event, done.error) == (Event.WRITE_FAILED, "it failed on another rank")
    assert offload.synced("a") == 0
