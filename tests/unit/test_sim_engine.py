"""The simulated engine against arithmetic, and against what SGLang is known to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tokenflow_bench.costs import MACHINES, Machine
from tokenflow_bench.metrics import StreamFigures
from tokenflow_bench.people import Pauses, Scanning
from tokenflow_bench.reading import pause_spans, read_times
from tokenflow_bench.simulated import records
from tokenflow_bench.simulator import Outcome, Part, simulate
from tokenflow_bench.simulator.copies import Copies
from tokenflow_bench.simulator.stock import Reserve
from tokenflow_bench.simulator.streams import Streams
from tokenflow_bench.workload import Workload, normal_lengths, poisson_arrivals
from tokenflow_engine.policy.base import EngineView, Phase, Place, Plan
from tokenflow_engine.policy.registry import POLICIES, policy_named

SMALL = replace(
    MACHINES["4090"],
    step_base_s=0.010,
    step_per_stream_s=0.0,
    step_per_context_token_s=0.0,
    prefill_base_s=0.005,
    prefill_per_token_s=0.0001,
    kv_tokens=1000,
    to_host_bytes_s=131072 * 1e4,
    to_device_bytes_s=131072 * 1e4,
    to_device_busy_bytes_s=131072 * 5e3,
)
"""Steps of 10 ms, prefills of 5 ms and 0.1 ms a token, copies of 10,000 tokens a second."""


def requests(
    count: int, *, prompt: int = 100, output: int = 50, rate: float = 20.0, arrived: float = 0.0
) -> Workload:
    return Workload.of(
        np.full(count, arrived), np.full(count, prompt), np.full(count, output), np.full(count, rate)
    )


def run(workload: Workload, machine: Machine = SMALL, policy: str = "fcfs", **options: bool) -> Outcome:
    return simulate(machine, workload, policy_named(policy), **options)


def first_s(outcome: Outcome, row: int = 0) -> float:
    return float(outcome.streams.token_s(row)[0])


def last_s(outcome: Outcome, row: int = 0) -> float:
    return float(outcome.streams.token_s(row)[-1])


def stall_s(outcome: Outcome, row: int = 0) -> float:
    record = records(outcome)[row]
    return StreamFigures.of(record, horizon_s=outcome.duration_s, window_s=outcome.duration_s).stall_s


class Scripted:
    """Plans at given times (at the first plan at or after each), stock before and between."""

    name = "scripted"

    def __init__(self, **plans: Plan) -> None:
        self.plans = [(float(at.removeprefix("at_").replace("_", ".")), plan) for at, plan in plans.items()]
        self.seen: list[EngineView] = []

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        self.seen.append(view)
        after = self.plans[0][0] if self.plans else float("inf")
        if view.now < after:
            return Plan(stock=True, next_at=after)
        plan = self.plans.pop(0)[1]
        plan.next_at = min(self.plans[0][0] if self.plans else plan.next_at, plan.next_at)
        return plan


def test_late_tokens_come_when_the_next_pass_is_over() -> None:
    """Passes end at 15, 25 and 35 ms, and then nothing is to do: the last token is sent at once."""
    work = Workload.of(np.array([0.0, 1.0]), np.full(2, 100), np.full(2, 3), np.full(2, 20.0))
    punctual, late = run(work), run(work, replace(SMALL, late_tokens=True))
    np.testing.assert_allclose(punctual.streams.token_s(0), [0.015, 0.025, 0.035])
    np.testing.assert_allclose(late.streams.token_s(0), [0.025, 0.035, 0.035])
    np.testing.assert_allclose(late.streams.token_s(1), [1.025, 1.035, 1.035], atol=0.002)
    assert late.duration_s == punctual.duration_s


def test_one_stream_takes_its_prefill_and_its_steps() -> None:
    outcome = run(requests(1, arrived=1.0))
    assert first_s(outcome) == pytest.approx(1.0 + 0.005 + 0.010)
    assert last_s(outcome) == pytest.approx(1.015 + 49 * 0.010)
    assert stall_s(outcome) == 0.0


def test_a_reader_faster_than_the_engine_stalls() -> None:
    """A token each 10 ms, read in 5 ms: it waits for half of the time, but for the last token."""
    outcome = run(requests(1, rate=200.0))
    assert stall_s(outcome) == pytest.approx(49 * 0.005)


def test_a_machine_never_stalls() -> None:
    workload = replace(requests(1, rate=200.0), machine=np.array([True]))
    assert stall_s(run(workload)) == 0.0


def test_a_paused_reader_keeps_its_text_and_does_not_stall() -> None:
    workload = replace(requests(1, output=100), spans=(pause_spans([(0.1, 0.6)]),))
    outcome = run(workload)
    assert stall_s(outcome) == 0.0
    unread = outcome.streams.unread(np.array([0]), now=last_s(outcome))
    assert unread[0] == pytest.approx(100 - 20 * (0.99 - 0.5), abs=0.01)


def test_prefill_alone_holds_decoding_up_and_a_mixed_pass_adds_its_tokens() -> None:
    arrived = np.array([0.0, 0.1])
    workload = Workload.of(arrived, np.array([100, 400]), np.array([50, 50]), np.array([20.0, 20.0]))
    alone = run(workload, mixed=False)
    mixed = run(workload, mixed=True)
    assert last_s(alone) == pytest.approx(0.015 + 49 * 0.010 + 0.045)
    assert last_s(mixed) == pytest.approx(0.015 + 49 * 0.010 + 0.040)


def test_long_prompts_are_prefilled_in_chunks() -> None:
    outcome = run(requests(1, prompt=900), replace(SMALL, chunk_tokens=400))
    assert first_s(outcome) == pytest.approx(3 * 0.005 + 0.09)


def test_the_stock_engine_admits_with_a_reserve_and_queues_the_rest() -> None:
    """1,000 tokens: a stream of 100 + 300 reserves all of it, so two fit, and the third waits for memory."""
    outcome = run(requests(3, prompt=100, output=300))
    assert first_s(outcome, 0) == pytest.approx(first_s(outcome, 1))
    assert first_s(outcome, 2) > 1.0


def test_once_full_the_stock_engine_admits_nobody_before_somebody_leaves() -> None:
    """SGLang's `batch_is_full`: that memory would do for a fifth one soon is not looked at.

    A newcomer asks for 100 + 100 tokens. The first pass promises 201 each of the 1,000 to four; after it they
    hold 400 and reserve 0.7 of 400, which leaves 320.
    """
    outcome = run(requests(5, prompt=100, output=100))
    assert first_s(outcome, 3) == pytest.approx(first_s(outcome, 0))
    assert first_s(outcome, 4) > min(float(outcome.streams.token_s(row)[-1]) for row in range(4))


def test_the_reserve_decays_and_jumps_after_a_retraction() -> None:
    streams = Streams(requests(2, output=400))
    reserve = Reserve()
    running = np.array([0])
    assert reserve.room(streams, running, free=1000) == pytest.approx(1000 - 0.7 * 400)
    for _ in range(600):
        reserve.decoded()
    assert reserve.room(streams, running, free=1000) == pytest.approx(1000 - 0.098 * 400)
    streams.generated[:] = 100
    reserve.retracted(streams, running)
    assert reserve.room(streams, running, free=1000) == pytest.approx(1000 - 300 * (100 + 20) / 401)


def test_retraction_takes_who_has_generated_least() -> None:
    streams = Streams(requests(3))
    streams.generated[:] = [30, 10, 20]
    assert Reserve.retraction_order(streams, np.arange(3)).tolist() == [1, 2, 0]


def test_the_stock_engine_retracts_when_memory_runs_out() -> None:
    """With the ratio at its least, newcomers come in on memory that the others will need."""
    workload = replace(requests(8, output=1000), arrived=2.0 * np.arange(8))
    outcome = run(workload, replace(SMALL, kv_tokens=3000))
    assert outcome.retractions > 0
    assert outcome.emergencies == 0, "it is what the engine does, not a fault of a policy"
    assert (outcome.streams.generated == 1000).all()


def test_an_evicted_stream_comes_back_by_a_load_and_goes_on() -> None:
    """150 dirty tokens out at 10,000 a second and back: 16 ms each way; nothing is computed again."""
    policy = Scripted(at_0_5=Plan(evict=[0]), at_1_0=Plan(load=[(0, Place.LOAD)]))
    outcome = simulate(SMALL, requests(1, output=100), policy)
    streams = outcome.streams
    context = 100 + int(policy.seen[-2].generated[0])
    out = 0.5 + 0.001 + context / 1e4
    assert policy.seen[2].kv_freeing == 0
    assert outcome.retractions == 0
    assert streams.preemptions[0] == 1
    assert outcome.bytes_moved == 2 * context * SMALL.kv_token_bytes
    decoding = (100 - 1) * 0.010 + 0.015
    assert last_s(outcome) == pytest.approx(decoding + 0.5 + 0.001 + context / 1e4, abs=0.02)
    assert out < 1.0


def test_written_pages_are_free_at_once() -> None:
    """With write-through the copy has been made before the eviction."""
    policy = Scripted(at_0_2=Plan(write=[0]), at_0_5=Plan(evict=[0]), at_0_6=Plan(load=[(0, Place.LOAD)]))
    simulate(SMALL, requests(1, output=100), policy)
    last = [view for view in policy.seen if view.phase[0] == Phase.OFFLOADED][-1]
    assert (last.kv_free, last.kv_freeing) == (1000, 0)


def test_parking_keeps_the_pages() -> None:
    policy = Scripted(at_0_2=Plan(park=[0]), at_0_5=Plan(resume=[0]))
    outcome = simulate(SMALL, requests(1), policy)
    parked = next(view for view in policy.seen if view.phase[0] == Phase.PARKED)
    assert parked.kv_free == 1000 - parked.owned[0]
    assert outcome.bytes_moved == 0
    assert last_s(outcome) == pytest.approx(0.015 + 49 * 0.010 + 0.3, abs=0.02)


def test_a_full_host_pool_means_computing_again() -> None:
    policy = Scripted(at_0_2=Plan(evict=[0]), at_0_3=Plan(stock=True))
    outcome = simulate(replace(SMALL, host_tokens=10), requests(1), policy)
    assert outcome.retractions == 1
    assert outcome.streams.generated[0] == 50


def full_host(due_s: dict[int, float]) -> Outcome:
    """Room for two contexts of three; the third leaves last."""
    evicted = Plan(evict=[0, 1])
    third = Plan(evict=[2], due_s=due_s)
    policy = Scripted(at_0_4=evicted, at_0_6=third, at_0_9=Plan(stock=True))
    outcome = simulate(replace(SMALL, host_tokens=300), requests(3, output=60), policy, until_s=0.85)
    assert outcome.retractions == 1
    return outcome


@pytest.mark.parametrize(
    ("due_s", "gone"),
    [({1: 1e6, 2: 5.0}, 1), ({0: 1e6 + 1, 1: 1e6, 2: 5.0}, 0), ({2: 5.0, 0: 4.0, 1: 4.0}, 2), ({}, 2)],
)
def test_in_a_full_host_pool_who_is_due_later_makes_room_as_in_the_engine(
    due_s: dict[int, float], gone: int
) -> None:
    streams = full_host(due_s).streams
    assert [row for row in range(3) if streams.phase[row] == Phase.WAITING] == [gone]
    assert streams.synced[gone] == 0
    assert all(streams.synced[row] > 100 for row in range(3) if row != gone)


def test_in_a_full_host_pool_copies_of_what_is_on_the_device_go_first() -> None:
    policy = Scripted(at_0_3=Plan(write=[0, 1]), at_0_5=Plan(evict=[2]), at_0_6=Plan(stock=True))
    outcome = simulate(replace(SMALL, host_tokens=280), requests(3, output=60), policy, until_s=0.59)
    assert outcome.retractions == 0
    assert outcome.streams.phase[2] == Phase.OFFLOADED
    assert outcome.streams.synced[0] == 0


def test_copies_queue_one_behind_the_other_and_share_the_link() -> None:
    copies = Copies(SMALL)
    assert copies.evict(100, now=0.0) == pytest.approx(0.011)
    assert copies.evict(100, now=0.0) == pytest.approx(0.022)
    assert copies.load(100, now=0.0) == pytest.approx(0.021), "slower while the other way is busy"
    assert copies.load(100, now=1.0) == pytest.approx(1.011)
    assert copies.idle_tokens(now=2.0, until=2.01) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("page", [1, 16])
def test_everything_is_generated_and_no_page_is_lost(name: str, page: int) -> None:
    """`simulate` checks its pages at the end; the same seed gives the same run."""
    machine = replace(MACHINES["laptop-tiny"], page_tokens=page)

    def once() -> Outcome:
        rng = np.random.default_rng(5)
        workload = Workload.of(
            poisson_arrivals(rng, 60, per_s=8.0),
            normal_lengths(rng, 60, mean=60),
            normal_lengths(rng, 60, mean=200),
            np.full(60, 15.0),
        ).with_pauses(Pauses(every_s=8.0, last_s=3.0), rng)
        return simulate(machine, workload, policy_named(name))

    one, other = once(), once()
    assert (one.streams.generated == one.streams.work.output).all()
    assert (one.streams.held == 0).all()
    assert one.duration_s == other.duration_s
    assert all(np.array_equal(one.streams.token_s(row), other.streams.token_s(row)) for row in range(60))


def test_the_simulated_reader_is_the_one_of_the_metrics() -> None:
    """Whoever reads, scans and pauses has read as much by any time as `reading.read_times` says."""
    rng = np.random.default_rng(3)
    workload = requests(4, output=300, rate=40.0).with_pauses(
        Scanning(read_s=1.0, scan_s=0.5, pause_s=0.5), rng
    )
    seen: list[tuple[float, list[float]]] = []

    class Watching(Scripted):
        def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
            if len(view) == len(workload):
                seen.append((view.now, (view.generated - view.buffered).tolist()))
            return Plan(stock=True, next_at=view.now + 0.05)

    outcome = simulate(replace(SMALL, kv_tokens=4000), workload, Watching())
    read_s = [read_times(workload.person(row), outcome.streams.token_s(row)) for row in range(4)]
    assert len(seen) > 50
    for now, consumed in seen:
        whole = [int(np.searchsorted(times, now + 1e-9, side="right")) for times in read_s]
        assert all(0 <= read - count < 1 + 1e-6 for read, count in zip(consumed, whole, strict=True))


def test_without_reports_a_pause_goes_unnoticed() -> None:
    workload = replace(requests(1, output=100), spans=(pause_spans([(0.1, 0.6)]),))
    seen: list[bool] = []

    class Watching(Scripted):
        def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
            seen.append(bool(view.paused[0]))
            return Plan(stock=True, next_at=view.now + 0.05)

    simulate(SMALL, workload, Watching())
    assert any(seen)
    seen.clear()
    simulate(SMALL, workload, Watching(), without=[Part.REPORTS])
    assert not any(seen)


def test_without_overlap_the_engine_waits_for_its_copies() -> None:
    """One leaves, the other goes on: later by a copy of about 150 tokens at 1,000 a second."""
    slow = replace(SMALL, to_host_bytes_s=131072 * 1e3)
    policy = {"at_0_5": Plan(evict=[0]), "at_1_5": Plan(stock=True)}
    beside = simulate(slow, requests(2, output=100), Scripted(**policy), until_s=1.4)
    waiting = simulate(slow, requests(2, output=100), Scripted(**policy), without=[Part.OVERLAP], until_s=1.4)
    assert last_s(waiting, 1) - last_s(beside, 1) == pytest.approx(0.001 + 0.148, abs=0.015)


def test_without_offload_nothing_goes_to_the_host() -> None:
    policy = Scripted(at_0_2=Plan(evict=[0]), at_0_3=Plan(stock=True))
    outcome = simulate(SMALL, requests(1), policy, without=[Part.OFFLOAD])
    assert (outcome.bytes_moved, outcome.retractions) == (0, 1)


def test_without_writes_everything_is_copied_when_it_leaves() -> None:
    policy = {"at_0_2": Plan(write=[0]), "at_0_5": Plan(evict=[0]), "at_0_6": Plan(load=[(0, Place.LOAD)])}
    synced = []
    for without in ([], [Part.WRITES]):
        watched = Scripted(**policy)
        simulate(SMALL, requests(1, output=100), watched, without=without)
        synced.append(next(int(view.synced[0]) for view in watched.seen if view.now >= 0.5))
    assert synced[0] > 140
    assert synced[1] == 0


def test_samples_count_everybody() -> None:
    outcome = simulate(SMALL, requests(8, output=200), policy_named("fcfs"), sample_s=0.1)
    first = outcome.samples[0]
    assert (first.running, first.waiting, first.preempted) == (3, 5, 0)
    assert len(outcome.samples) == pytest.approx(outcome.duration_s / 0.1, rel=0.15)
