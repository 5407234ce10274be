"""What the policy that ships decides, one situation at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.plans import NOW, Row, check, names, view_of
from tokenflow_bench.costs import MACHINES
from tokenflow_bench.views import IdleCopies
from tokenflow_engine.policy.base import EngineView, Phase, Place, Plan, Reason
from tokenflow_engine.policy.registry import policy_named

RUNNING, WAITING, OFFLOADED, PARKED = Phase.RUNNING, Phase.WAITING, Phase.OFFLOADED, Phase.PARKED


INFINITY = float("inf")


def plan_of(view: EngineView, **options: Any) -> Plan:
    plan = policy_named("adaptive", **options).plan(view, names(view))
    check(view, plan)
    return plan


def ahead(seconds: float, **values: Any) -> Row:
    """Running; its reader has so many seconds of text."""
    return Row(phase=RUNNING, generated=2000, rate=10.0, buffered=10.0 * seconds, **values)


def test_a_newcomer_takes_the_place_of_who_is_ahead_most() -> None:
    plan = plan_of(view_of(ahead(5), ahead(20), ahead(0.5), Row(phase=WAITING, context=100, waited=0)))
    assert plan.evict == [1]
    assert plan.admit == [3]
    assert plan.reasons[1] == Reason.AHEAD
    assert plan.reasons[3] == Reason.ADMITTED


def test_nobody_is_preempted_for_a_newcomer_when_nobody_is_ahead() -> None:
    plan = plan_of(view_of(*[ahead(0.5)] * 3, Row(phase=WAITING, context=100, waited=0), free=20))
    assert plan.evict == plan.admit == []
    assert plan.reasons[3] == Reason.NO_ROOM


def test_free_room_is_used_before_anybody_is_preempted() -> None:
    plan = plan_of(view_of(ahead(20), ahead(20), Row(phase=WAITING, context=100), free=400))
    assert (plan.evict, plan.admit) == ([], [2])


def test_a_paused_reader_goes_first() -> None:
    plan = plan_of(view_of(ahead(30), ahead(1, paused=True), Row(phase=WAITING, context=100)))
    assert plan.evict == [1]
    assert plan.reasons[1] == Reason.PAUSED


def test_a_machine_goes_before_a_reader() -> None:
    plan = plan_of(view_of(ahead(30), ahead(0, machine=True), Row(phase=WAITING, context=100)))
    assert plan.evict == [1]
    assert plan.reasons[1] == Reason.NO_READER


def test_who_has_just_come_stays() -> None:
    """Hysteresis: the stream that is ahead most came a moment ago."""
    plan = plan_of(view_of(ahead(5), ahead(20, since=0.1), Row(phase=WAITING, context=100)))
    assert plan.evict == [0]


def test_who_has_just_come_back_goes_last() -> None:
    """To leave again would be thrash; but if nobody else can, a reader who runs dry does not wait for it."""
    slow = MACHINES["a6000"]
    dry = Row(phase=OFFLOADED, generated=200, buffered=0, context=100, since=1.0)
    view = view_of(ahead(20, since=0.8), ahead(5), dry, machine=slow)
    assert plan_of(view).evict == [0]
    assert plan_of(replace(view, preemptions=np.array([1, 0, 0]))).evict == [1]
    alone = view_of(ahead(20, since=0.8), dry, machine=slow)
    assert plan_of(replace(alone, preemptions=np.array([1, 0]))).evict == [0]


def test_where_steps_are_fast_a_short_stay_is_enough() -> None:
    """In 0.8 s an H200 makes what its reader reads in many; who is ahead most goes, and nobody runs dry."""
    dry = Row(phase=OFFLOADED, generated=200, buffered=0, context=100, since=1.0)
    view = view_of(ahead(20, since=0.8), ahead(5), dry, machine=MACHINES["h200"])
    came_back = replace(view, preemptions=np.array([1, 0, 0]))
    assert plan_of(came_back).evict == [0]
    assert plan_of(came_back, again_steps=1e9).evict == [1], "negative control"


def test_newcomers_need_victims_further_ahead_than_who_has_begun() -> None:
    """Newcomers would take all who are a little ahead, and those who run dry would find nobody."""
    dry = Row(phase=OFFLOADED, generated=200, buffered=0, context=100, since=1.0)
    newcomer = Row(phase=WAITING, context=100, waited=0)
    assert plan_of(view_of(ahead(1.5), dry), ahead_new_s=2.0).evict == [0]
    assert plan_of(view_of(ahead(1.5), newcomer), ahead_new_s=2.0).evict == []
    assert plan_of(view_of(ahead(1.5), newcomer), ahead_new_s=0.5).evict == [0], "negative control"


def test_synced_streams_go_first_among_equals() -> None:
    plan = plan_of(view_of(ahead(10, synced=False), ahead(10), Row(phase=WAITING, context=100)))
    assert plan.evict == [1]


def test_a_newcomer_waits_for_pages_that_are_still_copied() -> None:
    """The victim's pages are not free yet: a later plan admits the newcomer, and nobody takes its place."""
    view = view_of(ahead(20, synced=False), ahead(0.5), Row(phase=WAITING, context=100))
    plan = plan_of(view)
    assert (plan.evict, plan.admit) == ([0], [])
    gone = replace(
        view,
        phase=np.array([OFFLOADED, RUNNING, WAITING], dtype=np.int8),
        owned=np.array([0, 500, 0]),
        kv_freeing=500,
    )
    assert plan_of(gone).evict == [], "the pages on their way are not asked for twice"


def test_who_would_run_dry_comes_back_in_time() -> None:
    away = Row(phase=OFFLOADED, generated=200, buffered=5, context=300)
    plan = plan_of(view_of(ahead(20), ahead(20), away))
    assert plan.evict in ([0], [1])
    assert plan.load == [(2, Place.LOAD)]
    assert plan.reasons[2] == Reason.URGENT


def test_who_has_text_left_stays_away_and_is_planned_for() -> None:
    away = Row(phase=OFFLOADED, generated=200, buffered=50, context=300)
    plan = plan_of(view_of(ahead(20), ahead(20), away, free=20))
    assert plan.evict == plan.load == []
    assert NOW < plan.next_at < NOW + 5


def test_a_starving_stream_takes_a_place_though_nobody_is_ahead() -> None:
    away = Row(phase=OFFLOADED, generated=200, buffered=0, context=300, since=25)
    assert plan_of(view_of(ahead(0.5), ahead(0.5), away)).load == [(2, Place.LOAD)]
    recent = replace_row(away, since=5.0)
    assert plan_of(view_of(ahead(0.5), ahead(0.5), recent)).load == []


def replace_row(row: Row, **values: Any) -> Row:
    return replace(row, **values)


def test_a_paused_reader_stays_away_until_it_comes_back() -> None:
    away = Row(phase=OFFLOADED, generated=200, buffered=0, paused=True)
    assert plan_of(view_of(ahead(20), ahead(20), away)).load == []
    back = replace_row(away, paused=False)
    assert plan_of(view_of(ahead(20), ahead(20), back)).load == [(2, Place.LOAD)]


def test_idle_memory_is_given_to_who_is_away() -> None:
    away = Row(phase=OFFLOADED, generated=200, buffered=100, rate=1.0, context=300)
    plan = plan_of(view_of(ahead(20), away, free=20_000))
    assert plan.load == [(1, Place.LOAD)]
    assert plan.reasons[1] == Reason.RESUMED


def test_of_who_is_not_due_the_one_with_most_to_generate_comes_back_first() -> None:
    """It is the one for which all would wait at the end."""
    old, young = (
        Row(phase=OFFLOADED, generated=tokens, buffered=buffered, rate=1.0, context=300)
        for tokens, buffered in ((400, 90), (100, 95))
    )
    paused = replace_row(young, paused=True)
    for others, first in ([old, young], 2), ([young, old], 1), ([paused, old], 2):
        plan = plan_of(view_of(ahead(20), *others, free=600))
        assert plan.load == [(first, Place.LOAD)]


def test_memory_for_the_next_steps_comes_first() -> None:
    plan = plan_of(view_of(ahead(0.5), ahead(0.2), ahead(0.3), free=0))
    assert plan.evict == [0]
    assert plan.reasons[0] == Reason.MEMORY


def test_fixed_streams_are_never_touched() -> None:
    rows = [ahead(30, may_park=False), ahead(30, may_park=False), Row(phase=WAITING, context=100)]
    plan = plan_of(view_of(*rows))
    assert plan.park == plan.evict == plan.write == plan.admit == []


def test_demand_beyond_capacity_is_refused() -> None:
    """Sixty readers at 25 tokens a second are more than a 4090 can serve: newcomers wait."""
    rows = [Row(phase=RUNNING, generated=200, rate=25.0, buffered=25, context=600) for _ in range(60)]
    newcomer = Row(phase=WAITING, context=600, rate=25.0, waited=0)
    plan = plan_of(view_of(*rows, newcomer, free=5_000, mean_output=2000.0))
    assert plan.admit == []
    assert plan.why_waiting == Reason.OVERLOAD
    fewer = plan_of(view_of(*rows[:20], newcomer, free=5_000, mean_output=2000.0))
    assert fewer.admit == [20]


def test_in_overload_a_heavier_class_still_comes_in() -> None:
    """What light classes were promised does not hold it back, and one of them makes way."""
    rows = [Row(phase=RUNNING, generated=200, rate=25.0, buffered=1, context=600) for _ in range(60)]
    premium = Row(phase=WAITING, context=600, rate=25.0, weight=4.0, waited=2.0)
    economy = Row(phase=WAITING, context=600, rate=25.0, waited=2.0)
    plan = plan_of(view_of(*rows, economy, premium, mean_output=2000.0))
    assert plan.admit == [61]
    assert plan.why_waiting == Reason.OVERLOAD


@pytest.mark.parametrize("lighter", [40, 300])
def test_many_of_a_light_class_who_wait_for_minutes_do_not_hide_a_heavier_one(lighter: int) -> None:
    """More of them than one plan looks at, and, with their lateness, more urgent than it: it comes first."""
    reader = Row(phase=RUNNING, generated=200, rate=5.0, buffered=500, context=600)
    light = [Row(phase=WAITING, context=600, weight=0.125, ttft_target=10.0, waited=90.0)] * lighter
    premium = Row(phase=WAITING, context=600, weight=8.0, waited=0.5)
    plan = plan_of(view_of(reader, *light, premium, free=2_000))
    assert plan.admit[0] == 1 + lighter


def test_passes_are_no_longer_than_the_tightest_reader_can_bear() -> None:
    newcomer = Row(phase=WAITING, context=1000, waited=0)
    reader = Row(phase=RUNNING, generated=2000, rate=25.0, buffered=2.5)
    tight = plan_of(view_of(ahead(30), reader, newcomer, free=5_000), lead_s=0.0).prefill_tokens
    calm = plan_of(view_of(ahead(30), ahead(10), newcomer, free=5_000)).prefill_tokens
    nobody = plan_of(view_of(newcomer, free=5_000)).prefill_tokens
    assert tight is not None
    assert calm is not None
    assert 16 <= tight < 600 < calm
    assert nobody is None


def test_streams_far_ahead_are_parked_when_steps_are_too_long_for_a_reader() -> None:
    """Where a step takes as long as its batch is large. Their KV stays: coming back costs nothing."""
    slow = MACHINES["laptop-smollm2"]
    rows = [
        Row(phase=RUNNING, generated=200, rate=5.0, buffered=100, context=160 + 16 * i) for i in range(20)
    ]
    tight = Row(phase=RUNNING, generated=200, rate=5.0, buffered=0.5)
    plan = plan_of(view_of(*rows, tight, machine=slow, free=4_096))
    assert plan.park
    assert plan.evict == []
    assert 20 not in plan.park
    assert plan_of(view_of(*rows, machine=slow, free=4_096)).park == [], "nobody is tight"


def test_who_was_parked_for_shorter_steps_stays_parked_while_they_are_needed() -> None:
    slow = MACHINES["laptop-smollm2"]
    parked = [Row(phase=PARKED, generated=200, rate=3.0, buffered=30, context=160)] * 3
    others = [Row(phase=RUNNING, generated=200, rate=2.0, buffered=10, context=160)] * 3

    def resumed(rate: float, buffered: float) -> list[int]:
        fast = Row(phase=RUNNING, generated=200, rate=rate, buffered=buffered, context=160)
        return plan_of(view_of(*parked, *others, fast, machine=slow, free=4_096)).resume

    assert resumed(11.0, 1.0) == []
    assert resumed(11.0, 20.0) == [0, 1, 2], "it has text"
    assert resumed(10.0, 1.0) == [0], "a step of five streams is short enough for it"


def test_while_newcomers_are_refused_only_who_is_further_ahead_is_parked() -> None:
    """A smaller batch makes fewer tokens, and in overload somebody waits for each of them."""
    slow = MACHINES["laptop-smollm2"]

    def plan(lead_s: float, *newcomers: Row, **options: float) -> Plan:
        rows = [
            Row(phase=RUNNING, generated=100, rate=1.0, buffered=lead_s, context=160, max_output=60)
            for _ in range(12)
        ]
        tight = Row(phase=RUNNING, generated=100, rate=8.0, buffered=2, context=160, max_output=60)
        view = view_of(*rows, tight, *newcomers, machine=slow, free=100, mean_output=120.0)
        return plan_of(view, catch_up_s=1.0, **options)

    refused = [Row(phase=WAITING, context=60, rate=8.0, waited=0.5)] * 20
    assert plan(1.6).park, "nobody waits"
    assert plan(1.6, *refused).park == []
    assert plan(1.6, *refused, calm_refusing_s=1.2).park, "negative control"
    assert plan(3.0, *refused).park


def test_nobody_is_parked_for_shorter_steps_that_make_too_few_tokens() -> None:
    """All are to read soon, and the whole batch is just fast enough: a smaller one would let all run dry."""
    slow = MACHINES["laptop-smollm2"]
    rows = [Row(phase=RUNNING, generated=200, rate=5.1, buffered=6.3, context=160) for _ in range(20)]
    tight = Row(phase=RUNNING, generated=200, rate=5.0, buffered=0.5)
    view = view_of(*rows, tight, machine=slow, free=4_096)
    assert plan_of(view).park == []
    assert plan_of(view, catch_up_s=1.0).park, "negative control: only what is read at once counts"


def _begun(*, late_s: float = 0.0, text_s: float = 0.2, **values: Any) -> list[Row]:
    """One who has just begun, on a slow engine, and three who wait for their first token."""
    begun = Row(phase=RUNNING, generated=10, rate=5.0, buffered=5.0 * text_s, context=80)
    newcomer = Row(phase=WAITING, context=75, rate=5.0, waited=1.0 + late_s, **values)
    return [begun, newcomer, newcomer, newcomer]


def _slow(rows: list[Row], **engine: Any) -> EngineView:
    return view_of(*rows, machine=MACHINES["laptop-smollm2"], free=2_000, **engine)


def test_who_has_just_begun_gets_a_lead_before_others_are_prefilled() -> None:
    """A prefill takes longer than it has to read, and steps are twice as fast as it reads."""
    waits = plan_of(_slow(_begun()))
    assert waits.admit == []
    assert waits.next_at < NOW + 0.3
    assert plan_of(_slow(_begun(text_s=2.0))).admit, "its lead pays for a pass"
    assert plan_of(_slow(_begun()), lead_s=0.0).admit, "negative control"


def test_newcomers_come_together_where_passes_are_mostly_base() -> None:
    """The lead pays for a pass of two, longer than what is let in otherwise: the first alone, at once."""
    machine = replace(MACHINES["laptop-smollm2"], prefill_base_s=0.3, prefill_per_token_s=1e-3)
    view = view_of(*_begun(text_s=0.9), machine=machine, free=2_000, max_running=3)
    assert plan_of(view).admit == [1, 2]
    assert plan_of(view, lead_s=0.0).admit == [1], "negative control"


def test_newcomers_come_one_by_one_where_each_pass_is_mostly_work() -> None:
    """The lead pays for the first alone; for all of them it would be waited for."""
    machine = replace(MACHINES["laptop-smollm2"], prefill_base_s=0.01, prefill_per_token_s=4e-3)
    assert plan_of(view_of(*_begun(text_s=0.6), machine=machine, free=2_000)).admit == [1]


@pytest.mark.parametrize(("prompt", "enough_s"), [(75, 0.4), (900, 4.0), (3000, 0.4)])
def test_a_lead_pays_for_a_long_prompt_or_for_a_part_of_one_that_is_too_long(
    prompt: int, enough_s: float
) -> None:
    newcomer = Row(phase=WAITING, context=prompt, rate=5.0, waited=1.0)

    def admitted(text_s: float) -> list[int]:
        begun = Row(phase=RUNNING, generated=80, rate=5.0, buffered=5.0 * text_s, context=160)
        machine = MACHINES["laptop-smollm2"]
        return plan_of(view_of(begun, newcomer, machine=machine, free=6_000, max_running=8)).admit

    assert admitted(0.2) == []
    assert admitted(enough_s) == [1]


def test_newcomers_do_not_wait_for_a_lead_for_ever() -> None:
    """Nor where decoding goes on in the same pass, nor for a reader as fast as the engine."""
    assert plan_of(_slow(_begun(late_s=2.0))).admit == []
    assert plan_of(_slow(_begun(late_s=3.5))).admit
    assert plan_of(_slow(_begun(), mixed=True)).admit
    rows = [replace_row(row, rate=20.0) for row in _begun()]
    assert plan_of(_slow(rows), no_lead_share=INFINITY).admit


def test_one_who_reads_as_fast_as_steps_are_made_takes_nobody_the_lead() -> None:
    """Its own would take for ever; that of who has just begun is waited for all the same."""
    fast = Row(phase=RUNNING, generated=10, rate=15.0, buffered=1.0, context=80)
    assert plan_of(_slow([fast, *_begun()])).admit == []
    assert plan_of(_slow([fast, *_begun(text_s=5.0)])).admit


def test_a_heavier_class_does_not_wait_for_the_lead_of_a_lighter_one() -> None:
    assert plan_of(_slow(_begun(weight=4.0))).admit


def test_who_has_no_token_yet_but_is_prefilled_counts_as_a_reader() -> None:
    begun, *newcomers = _begun()
    first = replace_row(begun, generated=0, buffered=0.0, waited=0.2)
    assert plan_of(_slow([first, *newcomers])).admit == []


def test_those_who_come_together_begin_together() -> None:
    """While nobody reads, as many as can have their first token in time: none runs dry meanwhile."""
    newcomers = [Row(phase=WAITING, context=75, rate=5.0, waited=0.0) for _ in range(9)]
    at_once = plan_of(_slow(newcomers, kv_tokens=1_000)).admit
    late = [replace_row(row, waited=2.0) for row in newcomers]
    assert len(at_once) > len(plan_of(_slow(late, kv_tokens=1_000)).admit) > 0


def test_a_pass_takes_whole_prompts_where_it_can() -> None:
    """What is left of one would be a pass of its own, made at once whatever readers can bear then."""
    plan = plan_of(_slow(_begun(text_s=0.7)))
    assert plan.prefill_tokens is not None
    fit = plan.prefill_tokens // 75
    assert 1 <= fit < 3
    assert len(plan.admit) == fit


def test_a_prompt_longer_than_what_is_let_in_ahead_still_comes_in() -> None:
    reader = Row(phase=RUNNING, generated=100, rate=5.0, buffered=50, context=80)
    plan = plan_of(_slow([reader, Row(phase=WAITING, context=300, rate=5.0, waited=0.5)]))
    assert plan.prefill_tokens is not None
    assert plan.prefill_tokens > 300, "it would fit into one pass, which takes 0.65 s"
    assert plan.admit == [1]


def test_patient_machines_take_what_is_left_and_in_the_end_a_place() -> None:
    patient = Row(phase=WAITING, context=100, machine=True, since=1.0, waited=1.0)
    assert plan_of(view_of(ahead(20), patient, free=20)).admit == []
    assert plan_of(view_of(ahead(20), patient, free=5_000)).admit == [1]
    waited = replace_row(patient, since=11.0, waited=11.0)
    assert plan_of(view_of(ahead(20), waited, free=20)).admit == [1]


def test_the_lead_cap_holds_only_while_somebody_waits() -> None:
    away = Row(phase=OFFLOADED, generated=200, buffered=500, rate=1.0)
    view = view_of(ahead(20), ahead(3), away, free=400)
    assert plan_of(view, lead_cap_s=10.0).park == [0]
    alone = view_of(ahead(20), ahead(3), free=100)
    assert plan_of(alone, lead_cap_s=10.0).park == []


def test_a_class_has_a_lead_cap_of_its_own() -> None:
    away = Row(phase=OFFLOADED, generated=200, buffered=500, rate=1.0)
    capped = replace_row(ahead(20), lead_cap=10.0)
    assert plan_of(view_of(capped, ahead(20), away, free=400)).park == [0]
    assert plan_of(view_of(ahead(20), ahead(20), away, free=400)).park == []
    assert plan_of(view_of(replace_row(ahead(20), lead_cap=30.0), ahead(20), away, free=400)).park == []


def test_kv_of_the_likeliest_victims_is_written_first() -> None:
    rows = [ahead(1, synced=False), ahead(30, synced=False), ahead(9, synced=False), ahead(5)]
    assert plan_of(view_of(*rows, free=40)).write == [1]
    due = Row(phase=OFFLOADED, generated=200, buffered=12, context=600)
    assert plan_of(view_of(*rows, due, free=40)).write == [1, 2]


def test_nothing_is_written_ahead_while_there_is_room() -> None:
    rows = [ahead(1, synced=False), ahead(30, synced=False)]
    assert plan_of(view_of(*rows, free=400)).write == []


def test_newcomers_come_in_as_they_come_where_all_fit_to_their_ends() -> None:
    """The engine is too slow for all of them, but to keep some out would make room for nobody.

    One pass at a time: a plan follows each.
    """
    slow = MACHINES["laptop-smollm2"]
    rows = [Row(phase=RUNNING, generated=10, rate=10.0, context=70) for _ in range(12)]
    rows[0] = replace_row(rows[0], rate=1.0)
    newcomers = [Row(phase=WAITING, context=60, rate=10.0, waited=0) for _ in range(2)]
    roomy = plan_of(view_of(*rows, *newcomers, machine=slow, free=16_000))
    assert roomy.admit == [12]
    scarce = plan_of(view_of(*rows, *newcomers, machine=slow, free=3_000))
    assert scarce.admit == []


def _as_fast_as_the_engine(rate: float = 3.0, **values: Any) -> EngineView:
    """Sixteen who come together, and all fit to their ends; four have begun."""
    begun = Row(phase=RUNNING, generated=5, buffered=1, rate=rate, context=65, **values)
    newcomer = Row(phase=WAITING, context=60, rate=rate, waited=0.5, **values)
    return view_of(
        *[begun] * 4, *[newcomer] * 12, machine=MACHINES["laptop-smollm2"], free=16_000, mean_output=120.0
    )


def test_where_nobody_gets_a_lead_the_engine_keeps_its_own_order() -> None:
    """Nothing is gained by holding newcomers back, and they would wait longer for their first token."""
    speed = 1 / MACHINES["laptop-smollm2"].decode_s(16, 16 * 120.0)
    assert plan_of(_as_fast_as_the_engine(speed)).stock
    assert plan_of(_as_fast_as_the_engine(2 * speed)).stock
    assert plan_of(_as_fast_as_the_engine(0.1, machine=True)).stock
    assert not plan_of(_as_fast_as_the_engine(0.5 * speed)).stock, "these get one"
    assert not plan_of(replace(_as_fast_as_the_engine(speed), kv_tokens=2_000)).stock, "not all fit"


def test_with_somebody_preempted_the_engine_is_not_left_alone() -> None:
    """It does not know of them."""
    view = _as_fast_as_the_engine(20.0)
    phase = view.phase.copy()
    phase[0] = PARKED
    assert 0 in plan_of(replace(view, phase=phase)).resume


def _next_prompt(*rows: Row, free: int = 16_000, **engine: Any) -> int:
    plan = plan_of(view_of(*rows, machine=MACHINES["laptop-smollm2"], free=free, mean_output=120.0, **engine))
    return plan.next_prompt if plan.stock else 0


def test_a_newcomer_that_nobody_would_notice_needs_no_plan() -> None:
    reader = Row(phase=RUNNING, generated=50, rate=4.0, buffered=8, context=100, max_output=100)
    assert _next_prompt(*[reader] * 4) > 200
    assert _next_prompt() == pytest.approx(16_000 * 0.95, abs=200), "all that memory holds"


def test_a_newcomer_that_somebody_would_notice_is_planned_for() -> None:
    reader = Row(phase=RUNNING, generated=50, rate=4.0, buffered=8, context=100, max_output=100)
    assert _next_prompt(*[reader] * 3, replace_row(reader, buffered=1.2)) < 72, "it would run dry"
    assert _next_prompt(reader, replace_row(reader, buffered=0.0, paused=True)) > 200, "it would not notice"
    assert _next_prompt(*[replace_row(reader, rate=20.0)] * 4) == 0, "nobody gets a lead"
    assert _next_prompt(*[reader] * 4, max_running=4) == 0, "no place"
    assert _next_prompt(*[reader] * 4, free=300, kv_tokens=900) == 0, "not all fit to their ends"


def _crowded(large: Row) -> EngineView:
    """`large` needs most of the memory; small ones are in it, nobody ahead, and another one waits."""
    small = Row(phase=RUNNING, generated=50, buffered=5, context=100, max_output=100)
    return view_of(large, *[small] * 10, Row(phase=WAITING, context=60, waited=1.5), free=600)


def test_small_newcomers_do_not_take_what_a_large_one_waits_for() -> None:
    assert plan_of(_crowded(Row(phase=WAITING, context=900, waited=3.5))).admit == [11]
    held = plan_of(_crowded(Row(phase=WAITING, context=900, waited=4.5)))
    assert (held.admit, held.evict) == ([], [])
    assert held.reasons[0] == Reason.NO_ROOM
    beyond = plan_of(_crowded(Row(phase=WAITING, context=1_700, waited=4.5)))
    assert beyond.admit == [11], "nothing is kept for one that can never fit"


def test_who_is_dry_and_large_has_its_room_kept() -> None:
    dry = Row(phase=OFFLOADED, generated=200, buffered=0, context=900)
    assert plan_of(_crowded(replace_row(dry, since=2.0))).admit == [11]
    assert plan_of(_crowded(replace_row(dry, since=4.0))).admit == []


def test_a_large_one_that_starves_takes_the_places_of_many() -> None:
    """Of those who have just come, too; one that has begun, or a machine."""
    dry = Row(phase=OFFLOADED, generated=200, buffered=0, context=900, since=21.0)
    for large in (
        dry,
        replace_row(dry, machine=True, since=31),
    ):
        plan = plan_of(_crowded(large))
        assert len(plan.evict) == 4
        assert 0 in [*plan.admit, *(row for row, _ in plan.load)]
        assert plan_of(_crowded(large), starving_s=1e9).evict == [], "negative control"


def test_one_that_does_not_fit_keeps_nobody_else_out() -> None:
    """A large one is first in line for idle memory; a parked one needs next to none of it."""
    large = Row(phase=OFFLOADED, generated=200, buffered=60, context=900)
    parked = Row(phase=PARKED, generated=200, buffered=70, context=300)
    plan = plan_of(view_of(large, parked, ahead(20), free=400))
    assert (plan.resume, plan.load) == ([1], [])


def _with_load_queue(view: EngineView, seconds: float) -> EngineView:
    class Busy(type(view.costs)):  # type: ignore[misc]
        def load_s(self, tokens: float) -> float:
            return seconds + super().load_s(tokens)

    return replace(view, costs=Busy(MACHINES["4090"]))


def test_a_very_long_load_queue_makes_recomputing_faster() -> None:
    """Longer than the prefill would hold up all who are in the batch: a shorter one has to be waited for."""
    away = Row(phase=OFFLOADED, generated=200, buffered=5, context=300)
    view = view_of(*[ahead(20)] * 20, away)
    assert plan_of(view).load == [(20, Place.LOAD)]
    assert plan_of(_with_load_queue(view, 0.2)).load == []
    assert plan_of(_with_load_queue(view, 5.0)).load == [(20, Place.RECOMPUTE)]


def test_who_is_left_in_host_memory_that_orders_do_without_comes_back_at_once() -> None:
    """What a prefill takes at the least is no queue of loads."""

    class Without(IdleCopies):
        def load_s(self, tokens: float) -> float:
            return self.prefill_s(tokens)

    slow = replace(MACHINES["4090"], prefill_base_s=0.06)
    away = [Row(phase=OFFLOADED, generated=200, buffered=1.0, since=5.0)] * 6
    view = view_of(*[ahead(60)] * 20, *away, free=6000, costs=Without(slow), host_free=0)
    assert [row for row, _ in plan_of(view).load] == [20, 21, 22, 23, 24, 25]


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown policy 'fifo'; there are: adaptive, andes, "):
        policy_named("fifo")
    for name in ("adaptive", "tokenflow", "andes", "fcfs"):
        with pytest.raises(ValueError, match=f"{name}.*(speed|no arguments)"):
            policy_named(name, speed=1)
