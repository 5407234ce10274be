"""How soon a preempted stream's memory is free, in scheduling passes: the executor without an engine."""

from __future__ import annotations

import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from support.bare_executor import PAGE, Batch, bare_executor, new_request, new_scheduler
from support.memory_transfer import MemoryTransfer
from support.tables import DEVICE, READER, FlatCosts, SameReaders, new_table
from tokenflow_engine.control.orders import Orders
from tokenflow_engine.kv.offload import OffloadManager
from tokenflow_engine.kv.transfer.agreed import AgreedTransfer
from tokenflow_engine.policy.base import Phase
from tokenflow_engine.policy.fcfs import FCFS
from tokenflow_engine.protocol import EngineStats
from tokenflow_engine.sglang.outside import Outside
from tokenflow_engine.sglang.planner import Planner


class Engine:
    """One stream of `tokens` in the batch, of which host memory holds the first `synced`.

    `ordered`: what comes after a copy may use its slots at once, as on a GPU's streams; else, as with several
    ranks, when the copy is done, which it is by the next pass.
    """

    def __init__(self, executor: type[Any], *, tokens: int, synced: int, ordered: bool) -> None:
        self.req = new_request("a", tokens)
        scheduler = new_scheduler(self.req)
        self.freed, self.batch, self.queue = scheduler.freed, scheduler.running_batch, scheduler.result_queue
        self._transfer = MemoryTransfer(slots=4096, host_tokens=4096, chunk_tokens=64, ordered=ordered)
        self._host = OffloadManager(self._transfer, page_tokens=PAGE)
        self.executor = executor(scheduler, new_host=lambda: self._host)
        self.executor.host.open()
        if synced:
            self._host.begin_iteration(synced)
            self._host.write("a", range(tokens), tokens)
            self._settle()
        assert self._host.synced("a") == synced

    def preempt(self) -> None:
        self.executor.order(Orders(evict=["a"]))

    def passes_until_free(self) -> int:
        """From the first one that could take it off the device: the last token's result is processed."""
        for number in range(1, 50):
            self.executor.step(self.batch)
            if self.freed:
                assert self.executor.phase("a") is Phase.OFFLOADED
                assert self._host.is_host_only("a")
                return number
            self._host.prepare_forward()
            self._host.forward_launched()
            if not self._transfer.ordered:
                self._transfer.finish_all()
        raise AssertionError("its memory was never free")

    def _settle(self) -> None:
        for _ in range(100):
            self._host.poll()
            self._host.forward_launched()
            self._transfer.finish_all()
        self._host.poll()


executor = pytest.fixture(bare_executor)


def test_a_synced_stream_is_free_in_the_pass_that_takes_it_off(executor: type[Any]):
    """Whatever its length: every page is in host memory already, the last one too."""
    engine = Engine(executor, tokens=20 * PAGE, synced=20 * PAGE, ordered=False)
    engine.preempt()
    assert engine.passes_until_free() == 1
    assert engine.executor.tally.synced_evictions == {"0": 1}


@pytest.mark.parametrize("ordered", [True, False])
def test_a_stream_synced_up_to_its_last_page_is_free_once_that_is_copied(executor: type[Any], ordered: bool):
    """The page that is being written is never there yet.

    On a GPU its copy need only be under way, which it is at once; else it counts a pass later.
    """
    engine = Engine(executor, tokens=20 * PAGE + 5, synced=20 * PAGE, ordered=ordered)
    engine.preempt()
    assert engine.passes_until_free() == (1 if ordered else 2)
    assert engine.executor.tally.synced_evictions == {"0" if ordered else "1": 1}


def test_a_result_under_way_is_awaited_first(executor: type[Any]):
    """With the overlap loop: one pass longer, in which its last token arrives."""
    engine = Engine(executor, tokens=20 * PAGE, synced=20 * PAGE, ordered=False)
    engine.queue.append((SimpleNamespace(reqs=[engine.req]), None))
    engine.preempt()
    engine.executor.step(engine.batch)
    assert not engine.freed
    engine.queue.clear()
    assert engine.passes_until_free() == 1
    assert engine.executor.tally.synced_evictions == {"1": 1}


def test_a_stream_that_is_not_synced_takes_longer(executor: type[Any]):
    """Negative control: without write-through the whole of it has to be copied first."""
    engine = Engine(executor, tokens=20 * PAGE, synced=0, ordered=False)
    engine.preempt()
    assert engine.passes_until_free() > 2
    assert not engine.executor.tally.synced_evictions


def test_host_memory_that_cannot_be_had_is_a_metric_and_not_the_end(executor: type[Any]):
    def none_left() -> OffloadManager:
        raise MemoryError("cannot pin")

    without = executor(SimpleNamespace(page_size=PAGE), new_host=none_left)
    assert without.tally.host_refused == 0
    assert without.host.open() is None
    assert without.tally.host_refused == 1


def test_ranks_that_cease_to_agree_are_a_metric(executor: type[Any], monkeypatch: pytest.MonkeyPatch):
    def lowest(_values: list[int]) -> list[int]:
        raise TimeoutError("rank 1 does not answer")

    agreed = AgreedTransfer(MemoryTransfer(slots=64, host_tokens=64), lowest)
    host = OffloadManager(agreed, page_tokens=PAGE, ranks_lost=lambda: agreed.is_lost)
    ranks = executor(idle_scheduler(), new_host=lambda: host)
    ranks.host.open()
    assert stats_of(ranks, monkeypatch).ranks_lost == 0
    host.write("a", range(PAGE), PAGE, leaving=True)
    host.prepare_forward()
    host.poll()
    assert stats_of(ranks, monkeypatch).ranks_lost == 1


def idle_scheduler() -> SimpleNamespace:
    return SimpleNamespace(page_size=PAGE, running_batch=Batch(), result_queue=deque())


def stats_of(executor: Any, monkeypatch: pytest.MonkeyPatch) -> EngineStats:
    monkeypatch.delitem(sys.modules, "tokenflow_engine.sglang.statistics", raising=False)
    from tokenflow_engine.sglang.statistics import engine_stats

    seen = EngineStats(
        at=0.0,
        running=0,
        waiting=0,
        parked=0,
        kv_used_tokens=0,
        kv_tokens=0,
        tokens_per_s=0.0,
        generated_total=0,
    )
    planner = Planner(
        FCFS(), table=new_table(), costs=FlatCosts(), device=lambda: DEVICE, readers=SameReaders()
    )
    outside = Outside(lambda _rid, _now: READER, lambda _rid: None)
    return engine_stats(seen, executor=executor, planner=planner, outside=outside)
