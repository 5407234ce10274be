"""Slack, demand, pass sizes and drafts by hand; and the two published policies where they decide."""

from __future__ import annotations

import math

import numpy as np
import pytest

from support.plans import NOW, Row, check, names, view_of
from tokenflow_bench.costs import MACHINES
from tokenflow_engine.policy.andes import Andes
from tokenflow_engine.policy.base import Phase, Reason
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.horizons import Gate
from tokenflow_engine.policy.lengths import EndedOutputs, expected_output
from tokenflow_engine.policy.passes import prefill_budget
from tokenflow_engine.policy.registry import policy_named
from tokenflow_engine.policy.rows import ascending, heaviest_first, lowest
from tokenflow_engine.policy.slack import Line, expected_remaining, slacks, urgencies
from tokenflow_engine.policy.victims import Victims

RUNNING, WAITING, OFFLOADED, PARKED = Phase.RUNNING, Phase.WAITING, Phase.OFFLOADED, Phase.PARKED
GATE = Gate(efficiency=0.9, keep_s=0.0, paused_share=0.5, yields_s=20.0)


def test_slack_is_seconds_until_the_reader_would_notice() -> None:
    view = view_of(
        Row(phase=RUNNING, buffered=50, rate=10),
        Row(phase=RUNNING, buffered=50, paused=True),
        Row(phase=WAITING, ttft_target=2.0, waited=0.5),
        Row(phase=WAITING, ttft_target=2.0, waited=5.0),
        Row(phase=RUNNING, machine=True),
        Row(phase=OFFLOADED, machine=True, since=4.0),
    )
    assert slacks(view, patience_s=10.0).tolist() == [5.0, math.inf, 1.5, -3.0, math.inf, 6.0]


def test_a_heavier_class_is_urgent_sooner_and_late_by_more() -> None:
    view = view_of(Row(phase=RUNNING, weight=4.0), Row(phase=RUNNING, weight=1.0))
    assert urgencies(np.array([2.0, 2.0]), view.weight).tolist() == [0.5, 2.0]
    assert urgencies(np.array([-2.0, -2.0]), view.weight).tolist() == [-8.0, -2.0]


def test_remaining_output_follows_the_mean_then_the_tail_never_the_limit() -> None:
    view = view_of(
        Row(phase=RUNNING, generated=100),
        Row(phase=RUNNING, generated=800),
        Row(phase=RUNNING, generated=800, max_output=50),
    )
    assert expected_remaining(view, tail=0.25).tolist() == [200.0, 200.0, 50.0]


def test_a_line_through_two_costs() -> None:
    line = Line.through(lambda tokens: 0.5 + 0.01 * tokens)
    assert line.base_s == pytest.approx(0.5)
    assert line.per_token_s == pytest.approx(0.01)
    assert line.within(1.5) == pytest.approx(100.0)
    assert line.within(0.1) == 0.0


def budget(
    tightest_s: float, *, token_s: float = 0.01, base_s: float = 0.0, mixed: bool = True
) -> int | None:
    """Beside decode steps of 20 ms, at a millisecond a token."""
    return prefill_budget(
        tightest_s,
        token_s=token_s,
        step_s=0.02,
        prefill=Line(base_s, 0.001),
        share=0.5,
        least_share=0.25,
        mixed=mixed,
    )


def test_a_pass_takes_a_share_of_the_smallest_slack() -> None:
    assert budget(math.inf) is None
    assert budget(1.0) == 480
    assert budget(0.01) == 16


def test_a_reader_who_gets_a_token_a_pass_does_not_fall_behind() -> None:
    """Nobody has text in hand as a burst begins: what they read in the meantime is what a pass may take."""
    assert budget(0.0, token_s=0.2) == 180


def test_a_prefill_pass_of_its_own_pays_its_base_and_does_some_work() -> None:
    assert budget(1.0, base_s=0.1, mixed=False) == 380
    assert budget(0.0, base_s=0.1, mixed=False) == 100
    assert budget(0.0, base_s=0.1, mixed=True) == 16


def test_lowest_keys_come_in_order_and_ties_in_row_order() -> None:
    keys = np.array([3.0, 1.0, 2.0, 1.0, 9.0])
    assert lowest(keys, np.arange(5), 3).tolist() == [1, 3, 2]
    assert lowest(keys, np.arange(5), 9).tolist() == [1, 3, 2, 0, 4]


@pytest.mark.parametrize("count", [0, 1, 2, 40, 200])
def test_all_rows_come_in_ascending_order_however_many_are_asked_for(count: int) -> None:
    keys = np.random.default_rng(1).integers(0, 20, 200).astype(float)
    rows = np.sort(np.random.default_rng(2).permutation(200)[:count])
    assert list(ascending(keys, rows)) == sorted(rows.tolist(), key=lambda row: keys[row])


@pytest.mark.parametrize("most", [1, 3, 5, 9])
def test_heavier_classes_come_first_and_in_each_the_most_urgent(most: int) -> None:
    urgency = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    weight = np.array([1.0, 4.0, 2.0, 4.0, 1.0, 9.0])
    rows = np.arange(5)  # not the heaviest of all
    assert heaviest_first(urgency, weight, rows, most).tolist() == [3, 1, 2, 4, 0][:most]
    assert heaviest_first(urgency, weight, rows[:0], most).tolist() == []


def _gate(count: int, newcomers: int, *, rate: float, buffered: float = 0.0, **gate: float) -> int:
    rows = [
        Row(phase=RUNNING, rate=rate, buffered=buffered, generated=2000, context=600, max_output=3000)
        for _ in range(count)
    ]
    rows += [Row(phase=WAITING, rate=rate, context=100, waited=0, max_output=3000) for _ in range(newcomers)]
    view = view_of(*rows, kv_tokens=41_408, free=0, mean_output=4000.0)
    remaining = np.full(len(view), 2000.0)
    values = {"efficiency": 0.9, "keep_s": 0.0, "paused_share": 0.5, "yields_s": 20.0} | gate
    order = np.arange(count, count + newcomers)
    passing = Gate(**values).passing(
        view, view.generated > 0, order, remaining=remaining, prefill=Line(0.0, 1e-6)
    )
    assert passing == order[: len(passing)].tolist()
    return len(passing)


def test_the_gate_admits_up_to_the_capacity_of_memory() -> None:
    """At 256 s contexts are about 1,100: 37 places, 1,500 tokens a second, nine tenths of it promised."""
    machine = MACHINES["4090"]
    admitted = _gate(20, 200, rate=10.0)
    mean_context = 600 * 20 / (20 + admitted) + 100 * admitted / (20 + admitted) + 1000
    assert (20 + admitted) * 10.0 == pytest.approx(0.9 * machine.capacity(mean_context), rel=0.1)


def test_the_gate_counts_leads_and_rates() -> None:
    assert _gate(40, 50, rate=20.0) < _gate(40, 50, rate=20.0, buffered=1500.0) <= 50
    assert _gate(20, 200, rate=20.0) < _gate(20, 200, rate=10.0)
    assert _gate(20, 200, rate=10.0, efficiency=0.6) < _gate(20, 200, rate=10.0)


def test_the_gate_keeps_leads_for_the_turns_of_others() -> None:
    """Those in memory at one time must do for those who wait for their turn."""
    assert _gate(40, 100, rate=15.0) > _gate(40, 100, rate=15.0, keep_s=4.0)
    assert _gate(5, 10, rate=20.0, keep_s=20.0) == 10, "all fit to their ends"


def test_a_reader_faster_than_the_engine_does_not_shut_the_gate() -> None:
    assert _gate(1, 1, rate=1000.0) == 1


def _passing_beside(*rows: Row) -> list[int]:
    """On an engine with eight places, on which a stream gets 9 tokens a second in a full batch."""
    view = view_of(*rows, machine=MACHINES["laptop-smollm2"], kv_tokens=1056, free=0, mean_output=120.0)
    inside = view.phase == RUNNING
    remaining = np.full(len(view), 100.0)
    return GATE.passing(view, inside, np.flatnonzero(~inside), remaining=remaining, prefill=Line(0.05, 0.002))


def test_beside_a_fast_reader_the_batch_has_to_be_small() -> None:
    newcomers = [Row(phase=WAITING, context=70, rate=2.0, waited=1.0)] * 12

    def passing(rate: float, **reader: int) -> int:
        return len(_passing_beside(Row(phase=RUNNING, context=80, rate=rate, **reader), *newcomers))

    assert passing(12.0) < passing(10.0) < passing(9.0) == passing(5.0)
    assert passing(12.0, generated=500, buffered=400) > passing(9.0), "it has all it needs for now"
    assert passing(500.0) > passing(13.0), "not for one whom no such batch is fast enough for"


def test_a_newcomer_too_fast_for_a_full_batch_lets_others_go_first_for_a_while() -> None:
    reader = Row(phase=RUNNING, context=80, rate=4.0)
    others = [Row(phase=WAITING, context=70, rate=4.0, waited=0.5)] * 2
    fast, patient = (Row(phase=WAITING, context=70, rate=11.0, waited=waited) for waited in (1.0, 21.0))
    assert _passing_beside(reader, fast, *others) == [2, 3, 1]
    assert _passing_beside(reader, patient, *others) == [1, 2, 3]


def test_a_prompt_longer_than_a_horizon_can_still_come_in() -> None:
    """Its prefill is cut into chunks: it does not have to be done before the first horizon."""
    view = view_of(Row(phase=RUNNING, rate=5.0), Row(phase=WAITING, context=30_000), free=35_000)
    remaining = expected_remaining(view, tail=0.25)
    slow = Line(0.0, 0.001)
    passing = GATE.passing(view, view.generated > 0, np.array([1]), remaining=remaining, prefill=slow)
    assert passing == [1]


def test_a_draft_counts_synced_pages_at_once_and_the_rest_later() -> None:
    view = view_of(
        Row(phase=RUNNING, context=100),
        Row(phase=RUNNING, context=100, synced=False),
        Row(phase=WAITING, context=90),
        free=10,
    )
    draft = Draft(view, steps=1)
    assert draft.free == 8, "less one step of each"
    draft.evict(1, Reason.AHEAD)
    assert (draft.free, draft.soon) == (9, 109)
    assert not draft.bring(2, Reason.ADMITTED)
    assert draft.will_fit(2)
    draft.evict(0, Reason.AHEAD)
    assert draft.bring(2, Reason.ADMITTED)
    assert draft.free == 110 - 91
    check(view, draft.finish(next_at=NOW + 1))


def test_a_draft_keeps_to_batch_places_and_request_rows() -> None:
    rows = [Row(phase=RUNNING), Row(phase=PARKED), Row(phase=WAITING), Row(phase=WAITING)]
    draft = Draft(view_of(*rows, free=9_000, max_running=2, max_resident=3))
    assert draft.bring(2, Reason.ADMITTED)
    assert not draft.bring(3, Reason.ADMITTED)
    draft.park(0, Reason.AHEAD)
    assert not draft.fits(3), "its row is still taken"
    assert draft.bring(1, Reason.RESUMED)


@pytest.mark.parametrize("count", [30, 200])
def test_who_goes_in_turn_goes_by_rank_those_included_that_are_new_or_have_just_come_back(count: int) -> None:
    dice = np.random.default_rng(count)
    rows = [
        Row(
            phase=RUNNING,
            generated=400,
            buffered=int(ahead),
            machine=ahead < 100,
            weight=0.25 if ahead % 3 else 4,
        )
        for ahead in dice.integers(0, 400, count)
    ]
    view = view_of(*rows)
    settled, recent, wanted = (dice.random(count) < share for share in (0.6, 0.3, 0.8))
    slack = slacks(view, patience_s=10.0)
    victims = Victims(view, Draft(view, steps=1), slack, np.zeros(count), settled=settled, recent=recent)
    in_turn = list(victims.in_turn(wanted))
    assert sorted(in_turn) == np.flatnonzero(wanted).tolist()
    ranks = victims.rank[in_turn].tolist()
    assert ranks == sorted(ranks)
    new = (~settled & wanted)[in_turn]
    assert new.any()
    assert not new[new.argmax() :].all()  # some who have settled go after some who are new


def test_andes_gains_most_for_who_would_run_dry() -> None:
    """By hand: at 10 tokens a second with an empty buffer, a horizon of 30 s, served faster than it reads."""
    view = view_of(
        Row(phase=RUNNING, buffered=0, waited=30), Row(phase=RUNNING, buffered=100, waited=30, rate=10)
    )
    gains = Andes(horizon_s=30.0)._gains(view, 0.02)
    whole = 0.5 * 10 * 60**2
    assert gains.tolist() == pytest.approx([0.5 * 10 * 30**2 / whole, 0.5 * 10 * 20**2 / whole])


def test_andes_swaps_who_reads_from_a_full_buffer_for_who_has_none() -> None:
    dry = Row(phase=OFFLOADED, generated=200, buffered=0)
    full = Row(phase=RUNNING, generated=900, buffered=800)
    view = view_of(full, full, dry)
    plan = policy_named("andes").plan(view, names(view))
    assert plan.load[0][0] == 2
    assert len(plan.evict) == 1


def test_tokenflow_swaps_at_its_ticks_only() -> None:
    policy = policy_named("tokenflow", interval_s=0.5)
    dry = Row(phase=OFFLOADED, generated=200, buffered=0, since=5.0)
    full = Row(phase=RUNNING, generated=900, buffered=800)
    calm = view_of(full, full, Row(phase=OFFLOADED, generated=900, buffered=800, since=5.0))
    assert policy.plan(calm, names(calm)).evict == []
    view = view_of(full, full, dry)
    assert policy.plan(view, names(view)).evict == [], "between two ticks"
    later = view_of(full, full, dry, now=NOW + 0.5)
    plan = policy.plan(later, names(later))
    assert len(plan.evict) == 1
    assert plan.load[0][0] == 2


def test_tokenflow_falls_back_to_the_queue_when_readers_want_more_than_there_is() -> None:
    rows = [Row(phase=RUNNING, rate=100.0, buffered=90, context=600) for _ in range(60)]
    newcomer = Row(phase=WAITING, context=600)
    view = view_of(*rows, newcomer)
    assert policy_named("tokenflow").plan(view, names(view)).stock
    away = Row(phase=OFFLOADED, context=600)
    view = view_of(*rows, newcomer, away, free=1_000)
    plan = policy_named("tokenflow").plan(view, names(view))
    assert (plan.evict, plan.admit) == ([], [])
    assert plan.load[0][0] == 61


def ended_after(*tokens: int) -> EndedOutputs:
    ended = EndedOutputs()
    for length in tokens:
        ended.add(length)
    return ended


def test_the_mean_output_is_neither_biased_by_long_answers_nor_by_a_burst() -> None:
    from_history = expected_output(np.zeros(60), EndedOutputs(), prior_tokens=300)
    burst = expected_output(np.full(60, 50), EndedOutputs(), prior_tokens=300)
    ended = ended_after(*[100] * 92)
    long = expected_output(np.full(4, 1600), ended, prior_tokens=100)
    short = 8 + ended.count.sum()
    assert from_history == burst == pytest.approx(300.0)
    assert long == pytest.approx((100 * short + 4 * 2000) / (short + 4))


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.75])
def test_of_a_burst_the_short_answers_end_first(share: float) -> None:
    """All began together, and those in the shortest `share` have ended: the rest is known to get longer."""
    lengths = np.sort(np.random.default_rng(1).normal(4000, 1200, 400).clip(100).astype(int))
    now = int(lengths[int(share * 400)])
    ended, live = lengths[lengths <= now], np.full(int((lengths > now).sum()), now)
    expected = expected_output(live, ended_after(*ended.tolist()), prior_tokens=4000)
    assert expected == pytest.approx(lengths.mean(), rel=0.15)
    as_others = (ended.sum() + 8 * 4000) / (len(ended) + 8)
    if share < 0.5:
        assert as_others < 0.75 * lengths.mean(), "negative control: as long as those"


def mean_of(ended: EndedOutputs, *, live: int = 0) -> float:
    return expected_output(np.zeros(live), ended, prior_tokens=256)


def test_answers_that_were_aborted_have_ended_like_others() -> None:
    """Also where nobody reads to the end, and where those who leave had not got a token yet."""
    ended = EndedOutputs()
    for _ in range(1000):
        ended.add(300)
    assert mean_of(ended) == pytest.approx(300, abs=2)
    for _ in range(1000):
        ended.add(0)
    assert mean_of(ended) == pytest.approx(300, abs=2)
    assert mean_of(EndedOutputs()) == 256


def test_the_mean_output_follows_the_traffic() -> None:
    ended = EndedOutputs()
    for tokens in [100] * 20_000 + [1000] * 1500:
        ended.add(tokens)
    assert 900 < mean_of(ended) <= 1000
