"""A full host pool: who leaves the device takes the room of those due back later, or is recomputed itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.bare_executor import PAGE, Request, bare_executor, new_request, new_scheduler
from support.memory_transfer import MemoryTransfer
from tokenflow_engine.control.orders import STOCK, Orders
from tokenflow_engine.control.parts import Parts
from tokenflow_engine.kv.offload import OffloadManager
from tokenflow_engine.policy.base import Phase, Place, Reason

executor = pytest.fixture(bare_executor)

HOST_PAGES = 4


class Engine:
    """Streams of `tokens` each in the batch, and a host pool of `HOST_PAGES` pages."""

    def __init__(self, executor: type[Any], **tokens: int) -> None:
        self.reqs = {rid: new_request(rid, count) for rid, count in tokens.items()}
        for number, req in enumerate(self.reqs.values()):
            req.kv.first_slot = 512 * number
        self.scheduler = new_scheduler(*self.reqs.values())
        self.transfer = MemoryTransfer(slots=4096, host_tokens=HOST_PAGES * PAGE, chunk_tokens=64)
        self.host = OffloadManager(self.transfer, page_tokens=PAGE)
        self.moves: list[tuple[str, Phase, Reason | None]] = []
        self.executor = executor(self.scheduler, new_host=lambda: self.host, moved=self._moved)
        self.executor.host.open()

    def order(self, *, steps: int = 6, **orders: Any) -> None:
        """Give these orders, and let copies happen between the steps that follow."""
        self.executor.order(Orders(**orders))
        for _ in range(steps):
            self.executor.step(self.scheduler.running_batch)
            self.host.check_integrity()
            self.host.prepare_forward()
            self.host.forward_launched()
            self.transfer.finish_all()

    @property
    def waiting(self) -> list[str]:
        return [req.rid for req in self.scheduler.waiting_queue]

    def where(self, *rids: str) -> list[Phase | None]:
        return [self.executor.phase(rid) for rid in rids]

    def _moved(self, req: Request, phase: Phase, reason: Reason | None) -> None:
        self.moves.append((req.rid, phase, reason))


def test_the_longest_pause_makes_room_for_a_reader(executor: type[Any]) -> None:
    engine = Engine(executor, paused=2 * PAGE, longer=2 * PAGE, reader=2 * PAGE)
    engine.order(evict=["paused", "longer"])
    assert engine.host.host_free == 0
    engine.order(evict=["reader"], due_s={"longer": 1e6 + 9, "paused": 1e6, "reader": 20.0})
    assert engine.where("paused", "longer", "reader") == [Phase.OFFLOADED, None, Phase.OFFLOADED]
    assert engine.host.is_host_only("reader")
    assert engine.host.synced("longer") == 0
    assert engine.waiting == ["longer"]
    assert engine.moves[-1] == ("longer", Phase.WAITING, Reason.HOST_FULL)
    assert (engine.executor.tally.made_room, engine.executor.tally.dropped) == (1, 0)


@pytest.mark.parametrize(
    "due_s",
    [
        {"a": 21.0, "b": 20.5, "leaves": 20.0},
        {"leaves": 20.0, "a": 5.0, "b": 4.0},
        {"a": 2.5, "b": 2.0},
        {},
    ],
    ids=["no clear gain", "due sooner", "about to come back", "unknown"],
)
def test_who_leaves_is_recomputed_where_nobody_is_due_clearly_later(
    executor: type[Any], due_s: dict[str, float]
) -> None:
    engine = Engine(executor, a=2 * PAGE, b=2 * PAGE, leaves=2 * PAGE)
    engine.order(evict=["a", "b"])
    engine.order(evict=["leaves"], due_s=due_s)
    assert engine.where("a", "b", "leaves") == [Phase.OFFLOADED, Phase.OFFLOADED, None]
    assert engine.waiting == ["leaves"]
    assert engine.moves[-1] == ("leaves", Phase.WAITING, Reason.HOST_FULL)
    assert (engine.executor.tally.made_room, engine.executor.tally.dropped) == (0, 1)


def test_nobody_is_given_up_where_that_would_not_do(executor: type[Any]) -> None:
    engine = Engine(executor, paused=2 * PAGE, near=2 * PAGE, long=3 * PAGE)
    engine.order(evict=["paused", "near"])
    engine.order(evict=["long"], due_s={"paused": 1e6, "long": 5.0, "near": 1.0})
    assert engine.where("paused", "near", "long") == [Phase.OFFLOADED, Phase.OFFLOADED, None]
    assert engine.executor.tally.made_room == 0


def test_copies_of_what_is_on_the_device_go_first(executor: type[Any]) -> None:
    engine = Engine(executor, paused=2 * PAGE, runs=2 * PAGE, leaves=2 * PAGE)
    engine.order(evict=["paused"], write=["runs"])
    engine.executor.write_through(1.0)
    engine.order(write=["runs"])
    assert engine.host.synced("runs") == 2 * PAGE
    engine.order(evict=["leaves"], due_s={"paused": 1e6, "leaves": 5.0})
    assert engine.where("paused", "leaves") == [Phase.OFFLOADED, Phase.OFFLOADED]
    assert engine.host.synced("runs") == 0
    assert engine.waiting == []


def test_who_is_on_the_way_back_is_never_given_up(executor: type[Any]) -> None:
    due_s = {"loads": 1e6 + 2, "wanted": 1e6 + 1, "leaves": 5.0}
    engine = Engine(executor, loads=2 * PAGE, wanted=2 * PAGE, leaves=2 * PAGE)
    engine.order(evict=["loads", "wanted"])
    engine.host.load("loads", 0, range(2 * PAGE))  # and until that is done
    engine.order(steps=1, evict=["leaves"], load=[("wanted", int(Place.LOAD))], due_s=due_s)
    assert engine.executor.tally.made_room == 0
    assert engine.waiting == ["leaves"]


def test_who_has_not_left_yet_keeps_its_copy(executor: type[Any]) -> None:
    """Its result is under way, and its KV still on the device: it is not to be computed again."""
    engine = Engine(executor, near=2 * PAGE, flies=2 * PAGE, leaves=2 * PAGE)
    engine.order(evict=["near"])
    engine.executor.order(Orders(write=["flies"]))
    engine.executor.write_through(1.0)
    engine.order(write=["flies"])
    engine.scheduler.result_queue.append((SimpleNamespace(reqs=[engine.reqs["flies"]]), None))
    engine.order(evict=["flies", "leaves"], due_s={"flies": 1e6, "leaves": 5.0, "near": 1.0})
    assert engine.host.synced("flies") == 2 * PAGE
    assert engine.waiting == ["leaves"]
    engine.scheduler.result_queue.clear()
    engine.order()
    assert engine.where("near", "flies", "leaves") == [Phase.OFFLOADED, Phase.OFFLOADED, None]


def test_room_that_was_made_for_one_is_not_taken_by_the_next(executor: type[Any]) -> None:
    engine = Engine(executor, paused=2 * PAGE, other=2 * PAGE, first=2 * PAGE, second=2 * PAGE)
    engine.order(evict=["paused", "other"])
    due_s = {"paused": 1e6, "second": 9.0, "first": 8.0, "other": 1.0}
    engine.order(evict=["first", "second"], due_s=due_s)
    assert engine.where("first", "second") == [Phase.OFFLOADED, None]
    assert engine.waiting == ["paused", "second"]


def test_without_the_host_tier_nobody_makes_room(executor: type[Any]) -> None:
    engine = Engine(executor, paused=2 * PAGE, other=2 * PAGE, leaves=2 * PAGE)
    engine.order(evict=["paused", "other"])
    due_s = {"paused": 1e6, "leaves": 5.0}
    engine.order(evict=["leaves"], due_s=due_s, parts=Parts(offload=False))
    assert engine.where("paused", "leaves") == [Phase.OFFLOADED, None]
    assert engine.moves[-1] == ("leaves", Phase.WAITING, None)


def test_who_made_room_comes_back_when_a_plan_admits_it(executor: type[Any]) -> None:
    """Or with everybody else, once the engine's own order stands."""
    engine = Engine(executor, paused=2 * PAGE, other=2 * PAGE, leaves=2 * PAGE)
    engine.order(evict=["paused", "other"])
    engine.order(evict=["leaves"], due_s={"paused": 1e6, "leaves": 5.0})
    assert engine.executor.first_in_line() == []
    engine.executor.order(Orders(admit=["paused"]))
    engine.executor.launching(Batchlike(engine.reqs["paused"]))
    assert engine.executor.returns.durations().keys() == {"recomputed"}
    engine.executor.order(STOCK)
    assert engine.waiting == ["paused"]


class Batchlike:
    def __init__(self, *reqs: Request) -> None:
        self.reqs = [*reqs]
