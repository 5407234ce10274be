"""Tensor-parallel ranks with a host pool that is always full: the same streams give way on all ranks.

Each rank is a thread with an executor of its own, on copies of its own speed and failures. All get the same
orders. What is compared is where every stream is, and who was told what.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import BrokenBarrierError
from typing import Any

import pytest

from support.bare_executor import PAGE, Request, bare_executor, new_request, new_scheduler
from support.ranks import Reduction, SlowTransfer
from tokenflow_engine.control.orders import Orders
from tokenflow_engine.kv.offload import OffloadManager
from tokenflow_engine.kv.transfer.agreed import AgreedTransfer, Lowest
from tokenflow_engine.kv.transfer.base import Transfer
from tokenflow_engine.policy.base import Phase, Place, Reason

executor = pytest.fixture(bare_executor)

RANKS = 3
STEPS = 600
RIDS = [f"s{number}" for number in range(8)]
SLOTS_EACH = 64

Due = Callable[[random.Random, int], float]
"""When a stream is due back, by the dice that all ranks share; for this rank."""


class Rank:
    def __init__(self, executor: type[Any], number: int, seed: int, transfer: AgreedTransfer) -> None:
        self.number = number
        self.dice = random.Random(seed)  # noqa: S311 - the same on all ranks
        self.reqs = {rid: new_request(rid, self.dice.randrange(4, 24)) for rid in RIDS}
        for place, req in enumerate(self.reqs.values()):
            req.kv.first_slot = SLOTS_EACH * place
        self.scheduler = new_scheduler(*self.reqs.values())
        self.host = OffloadManager(
            transfer,
            page_tokens=PAGE,
            common_s=transfer.common_s,
            ranks_lost=lambda: transfer.is_lost,
        )
        self.moves: list[tuple[str, Phase, Reason | None]] = []
        self.executor = executor(self.scheduler, new_host=lambda: self.host, moved=self._moved)
        self.executor.host.open()

    def run(self, copies: SlowTransfer, due: Due) -> list[Any]:
        """The state after every step."""
        history = []
        for _ in range(STEPS):
            copies.let_happen()
            self.executor.order(self._orders(due))
            self.scheduler.running_batch = self.executor.step(self.scheduler.running_batch)
            self.executor.write_through(0.05)
            self._prefill()
            self.host.prepare_forward()
            self.host.check_integrity()
            history.append(self._state())
        return history

    def _orders(self, due: Due) -> Orders:
        """At random, of what is possible by this rank's state."""
        dice, running = self.dice, [req.rid for req in self.scheduler.running_batch.reqs]
        evict = [rid for rid in running if dice.random() < 0.1][: max(0, len(running) - 1)]
        away = [rid for rid in RIDS if self.executor.phase(rid) is Phase.OFFLOADED]
        return Orders(
            evict=evict,
            load=[(rid, int(dice.choice([*Place]))) for rid in away if dice.random() < 0.1],
            admit=[req.rid for req in self.scheduler.waiting_queue if dice.random() < 0.3],
            write=[rid for rid in running if rid not in evict and dice.random() < 0.3],
            due_s={rid: due(dice, self.number) for rid in dice.sample(RIDS, len(RIDS))},
        )

    def _prefill(self) -> None:
        """The engine's part: who was admitted, or is first in line, runs again."""
        wanted = {*self.executor.orders.admit, *self.executor.first_in_line()}
        for req in [req for req in self.scheduler.waiting_queue if req.rid in wanted]:
            self.scheduler.waiting_queue.remove(req)
            req.kv.holds_kv = True
            self.scheduler.running_batch.reqs.append(req)

    def _state(self) -> list[Any]:
        where = [(rid, self.executor.phase(rid), self.host.synced(rid)) for rid in RIDS]
        waiting = [req.rid for req in self.scheduler.waiting_queue]
        moves, self.moves = self.moves, []
        return [where, waiting, moves, self.host.host_free]

    def _moved(self, req: Request, phase: Phase, reason: Reason | None) -> None:
        self.moves.append((req.rid, phase, reason))


def run_all(
    executor: type[Any],
    seed: int,
    *,
    wrap: type[AgreedTransfer] = AgreedTransfer,
    due: Due = lambda dice, _rank: dice.choice([1e6, 30.0, 5.0]) + dice.random() * 10,
) -> tuple[list[Rank], list[list[Any]]]:
    reduction = Reduction(RANKS)
    copies = [
        SlowTransfer(
            random.Random(f"{seed} {number}"),  # noqa: S311 - not for secrets
            slots=SLOTS_EACH * len(RIDS),
            host_tokens=6 * PAGE,
        )
        for number in range(RANKS)
    ]
    ranks = [Rank(executor, n, seed, wrap(copies[n], reduction.lowest)) for n in range(RANKS)]

    def run(rank: Rank) -> list[Any]:
        try:
            return rank.run(copies[rank.number], due)
        except BaseException:
            reduction.stop()
            raise

    with ThreadPoolExecutor(RANKS) as threads:
        return ranks, list(threads.map(run, ranks))


@pytest.mark.parametrize("seed", range(4))
def test_the_same_streams_give_way_on_all_ranks(executor: type[Any], seed: int) -> None:
    ranks, histories = run_all(executor, seed)
    for step, states in enumerate(zip(*histories, strict=True)):
        assert all(state == states[0] for state in states), f"step {step}"
    tally = ranks[0].executor.tally
    reasons = Counter(reason for state in histories[0] for _, _, reason in state[2])
    assert min(tally.made_room, tally.dropped, tally.offloaded, tally.loaded, tally.recomputed) > 5, tally
    assert reasons[Reason.HOST_FULL] >= tally.made_room
    assert not any(rank.host.statistics().ranks_lost for rank in ranks)


class Unheard(AgreedTransfer):
    """Each rank goes by its own copies."""

    def __init__(self, transfer: Transfer, _lowest: Lowest) -> None:
        super().__init__(transfer, lambda values: values)


def test_with_copies_not_agreed_on_their_states_differ(executor: type[Any]) -> None:
    _, histories = run_all(executor, 1, wrap=Unheard)
    assert histories[0] != histories[1]


def test_with_an_order_of_each_ranks_own_their_states_differ(executor: type[Any]) -> None:
    """The same agreement, but who is due when is what each rank thinks: they copy different things."""

    def own(dice: random.Random, rank: int) -> float:
        seconds = 1e6 * dice.random()
        return seconds if rank else 1e6 - seconds

    with pytest.raises((AssertionError, ValueError, BrokenBarrierError)):
        _, histories = run_all(executor, 1, due=own)
        assert histories[0] == histories[1]
