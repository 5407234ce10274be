"""`make proof`: what fits into the time, and the simulator held against what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenflow_bench.burst.rounds import requests_of, waits_of
from tokenflow_bench.burst.scenarios import Plan
from tokenflow_bench.burst.setups import SETUPS
from tokenflow_bench.calibrate.fit import Costs
from tokenflow_bench.costs import MACHINES, Machine, read_machines
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.metrics import Record
from tokenflow_bench.proof import __main__ as proof
from tokenflow_bench.proof.page import html, machine_table
from tokenflow_bench.proof.plots import proof_plots
from tokenflow_bench.proof.schedule import schedule
from tokenflow_bench.reading import Person, pause_spans
from tokenflow_bench.simulated import measure
from tokenflow_bench.simulator import Part, simulate
from tokenflow_bench.simulator.validate import Comparison, comparison_table, in_short, machines_of, validate
from tokenflow_bench.spread import Spread
from tokenflow_bench.timelines import readers_timeline
from tokenflow_bench.workload import Workload
from tokenflow_engine.policy.registry import policy_named

PLAN = Plan(
    policies=(),
    loads=(0.8, 1.2),
    runs=1,
    seed=1,
    target_s=1.0,
    max_lag_ms=20.0,
    max_others=0.25,
    kv_tokens=None,
    threads=None,
    say=print,
)
TINY = replace(MACHINES["laptop-tiny"], kv_tokens=2048)
TIMELINE = readers_timeline(
    [
        Record(
            due_s=0.0,
            token_s=np.array([1.0, 1.1, 1.2]),
            person=Person(5.0),
            output_tokens=3,
            is_whole=True,
            ttft_target_s=1.0,
        )
    ]
)


def test_more_time_means_more_rounds() -> None:
    setups = list(SETUPS.values())
    half, quarter, hours = (schedule(PLAN, setups, within_s=60 * minutes) for minutes in (30, 15, 600))
    assert half.seconds <= 30 * 60
    assert hours.plan.runs == 5
    assert quarter.plan.runs < half.plan.runs < 5
    assert schedule(PLAN, setups, within_s=1).plan.runs == 1


def test_everything_is_compared() -> None:
    """Both loads on each set-up; the first also has all policies, and with fewer rounds pauses and parts."""
    found = schedule(PLAN, list(SETUPS.values()), within_s=1e6)
    titles = [[(one.title, one.runs) for one in comparisons] for _, comparisons in found.work]
    assert titles[1] == [("load 0.8", None), ("load 1.2", None)]
    assert titles[0] == [
        *titles[1],
        ("load 1.2, every second reader pauses for 10 s", 3),
        ("load 1.2, parts taken away", 3),
    ]
    names = [[case.name for case in one.cases] for one in found.work[0][1]]
    assert names[:2] == [["fcfs", "adaptive"], ["fcfs", "andes", "tokenflow", "adaptive"]]
    assert [len(one.cases) for one in found.work[1][1]] == [2, 2]


def result(
    machine: Machine, *, policy: str = "fcfs", pausing: bool = False, told: bool = False
) -> dict[str, Any]:
    """As if `machine` had been a real engine: two rounds of one case."""
    runs = []
    for seed in (1, 2):
        work = SETUPS["tiny"].burst(30, seed=seed)
        if pausing:
            pause = pause_spans([(2.0, 12.0)])
            work = replace(work, spans=tuple(pause if row % 2 else () for row in range(30)))
        spread = replace(work, arrived=0.0012 * np.arange(30))
        without = [] if told else [Part.REPORTS]
        outcome = simulate(machine, spread, policy_named(policy), mixed=False, without=without)
        preempted = float(outcome.streams.preemptions.sum())
        runs.append(
            {
                "figures": as_clients_see(measure(outcome).document()),
                "engine": {"tokenflow_engine_preemptions{parked}": preempted, "retracted": 0.0},
                "requests": requests(work),
            }
        )
    table = {
        "setup": "tiny",
        "title": "load 1.2",
        "load": 1.2,
        "pausing": pausing,
        "told": ["case"] if told else [],
        "kv_tokens": machine.kv_tokens,
        "flags": [],
        "policies": {"case": policy},
        "cases": {"case": runs},
    }
    return {"tables": [table, {**table, "setup": "smollm2"}]}


def as_clients_see(figures: dict[str, Any]) -> dict[str, Any]:
    """With the way to the engine and back."""
    return figures | {name: figures[name] + 0.015 for name in ("ttft_mean_s", "ttft_p99_s")}


def requests(work: Workload) -> dict[str, list[Any]]:
    names = ("arrived", "prompt", "output", "max_output", "rate")
    pauses = [work.person(row).pauses() for row in range(len(work))]
    return {name: getattr(work, name).tolist() for name in names} | {"pauses": pauses}


@pytest.mark.parametrize("policy", ["fcfs", "adaptive"])
def test_a_machine_that_is_the_engine_is_within(policy: str) -> None:
    """Of tables without a machine nothing is said."""
    found = validate(result(TINY, policy=policy), {"laptop-tiny": TINY})
    assert [one.figure for one in found] == ["TTFT, mean, s", "TTFT, p99, s", "raw, tokens/s", "preemptions"]
    assert all(one.is_within for one in found)
    assert found[0].ratio == pytest.approx(1.0, abs=0.02)
    assert json.loads(json.dumps([one.document() for one in found]))[0]["is_within"] is True
    assert in_short(found) == "4 of 4 figures within 15 %"


@pytest.mark.parametrize("told", [True, False])
def test_readers_who_pause_are_compared_as_the_engine_knew_of_them(told: bool) -> None:
    document = result(TINY, policy="adaptive", pausing=True, told=told)
    found = validate(document, {"laptop-tiny": TINY})
    assert [one.ratio for one in found] == pytest.approx([1.0] * 4, abs=0.02)
    document["tables"][0]["told"] = [] if told else ["case"]
    assert [one.ratio for one in validate(document, {"laptop-tiny": TINY})] != pytest.approx(
        [1.0] * 4, abs=0.02
    )
    for run in document["tables"][0]["cases"]["case"]:
        del run["requests"]["pauses"]
    with pytest.raises(ValueError, match="earlier version"):
        validate(document, {"laptop-tiny": TINY})


def costs_of(machine: Machine) -> dict[str, Any]:
    names = ("step_base_s", "step_per_stream_s", "step_per_context_token_s", "prefill_base_s")
    found = {name: getattr(machine, name) for name in (*names, "prefill_per_token_s")}
    return Costs(**found, error=0.05, passes=100, prefills=9, is_late=machine.late_tokens).document()


def test_each_round_is_simulated_on_the_machine_of_its_time() -> None:
    """Twice as slow in the second round; and a round before which nothing could be measured is left out."""
    slow = replace(
        TINY,
        step_base_s=2 * TINY.step_base_s,
        step_per_stream_s=2 * TINY.step_per_stream_s,
        prefill_base_s=2 * TINY.prefill_base_s,
        prefill_per_token_s=2 * TINY.prefill_per_token_s,
    )
    document, slower = result(TINY), result(slow)
    table = document["tables"][0]
    table["cases"]["case"][1] = slower["tables"][0]["cases"]["case"][1]
    table["costs"] = [costs_of(TINY), None, costs_of(slow)]
    found = validate(document, {"laptop-tiny": MACHINES["laptop-tiny"]})
    for one in found[:3]:
        assert one.simulated.low == pytest.approx(one.real.low, rel=0.01)
        assert one.simulated.high == pytest.approx(one.real.high, rel=0.01)
    names = [machine.name for machine in machines_of(table, TINY) if machine is not None]
    assert names == ["tiny, load 1.2, round 1", "tiny, load 1.2, round 2"]
    table["costs"][0] = None
    [_, _, raw, _] = validate(document, {"laptop-tiny": TINY})
    assert (
        raw.real.low
        == raw.real.high
        == slower["tables"][0]["cases"]["case"][1]["figures"]["raw_tokens_per_s"]
    )
    table["costs"][2] = None
    assert validate(document, {"laptop-tiny": TINY}) == []


def test_the_machine_that_is_kept_is_of_a_round_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three speeds neither the fastest nor the slowest; it is one that `tokenflow sim` reads."""
    tables = []
    for title, factor in (("one", 1.0), ("two", 3.0), ("three", 2.0)):
        machine = replace(
            TINY,
            step_base_s=factor * TINY.step_base_s,
            step_per_stream_s=factor * TINY.step_per_stream_s,
        )
        table = {"setup": "tiny", "title": title, "kv_tokens": 2048, "cases": {}, "cores": "on two cores"}
        tables.append({**table, "costs": [costs_of(machine)] * 2})
    path = tmp_path / "out" / "machines.toml"
    monkeypatch.setattr(proof, "_MACHINES", path)
    monkeypatch.setattr(proof, "_ROOT", tmp_path)
    proof.keep_machines({"tables": tables}, MACHINES)
    [kept] = read_machines(path).values()
    assert kept.name == "laptop-tiny"
    assert kept.step_base_s == pytest.approx(2 * TINY.step_base_s)
    assert "tiny, three, round 1" in kept.source
    assert len(proof.machines_used({"tables": tables}, MACHINES)) == 3


def test_a_set_up_whose_machine_is_not_known_is_left_out() -> None:
    """A file of machines need not have all of them: what was measured is kept all the same."""
    table = {"title": "load 1.2", "kv_tokens": 2048, "cases": {"case": [{}]}}
    tables = [{**table, "setup": name} for name in ("tiny", "smollm2")]
    assert proof.machines_used({"tables": tables}, {"laptop-tiny": TINY}) == [TINY]


def test_a_machine_that_is_slower_is_not() -> None:
    slower = replace(TINY, step_base_s=2 * TINY.step_base_s, step_per_stream_s=2 * TINY.step_per_stream_s)
    found = validate(result(TINY), {"laptop-tiny": slower})
    raw = found[2]
    assert not raw.is_within
    assert raw.ratio == pytest.approx(0.5, abs=0.1)
    assert "**no**" in comparison_table(found).text()
    assert "fcfs" not in in_short(found)
    assert "raw, tokens/s x0.5" in in_short(found)


def test_what_varies_by_itself_may_be_off_as_far() -> None:
    """Rounds from 10 to 14: 13 is within no 15 % of their median, but among them; 15 is not."""
    rounds = Spread(median=11, low=10, high=14)
    common = {"setup": "s", "title": "t", "case": "c", "figure": "preemptions", "digits": 0}
    near, far = (
        Comparison(real=rounds, simulated=Spread(value, value, value), ratio=value / 11, **common)  # type: ignore[arg-type]
        for value in (13.0, 15.0)
    )
    assert not near.is_within
    assert near.is_in_range
    assert not far.is_in_range
    assert [row[-1] for row in comparison_table([near, far]).rows] == ["no, but in range", "**no**"]
    assert in_short([near, far]) == (
        "0 of 2 figures within 15 %, 1 more in the range of the real rounds; not: s, t, c: preemptions x1.36"
    )


def test_an_older_result_is_refused() -> None:
    document = result(TINY)
    del document["tables"][0]["cases"]["case"][0]["requests"]
    with pytest.raises(ValueError, match="earlier version"):
        validate(document, {"laptop-tiny": TINY})


def test_requests_are_what_came() -> None:
    """An answer that was cut off counts as asked for, a whole one as long as it was."""
    whole = StreamLog(index=0, due_s=1.0, person=Person(5.0), output_tokens=9, prompt_tokens=70)
    whole.token_s, whole.end_s = [2.0, 3.0], 3.0
    cut = StreamLog(
        index=1, due_s=1.5, person=Person.with_pauses(6.0, [(3, 13)]), output_tokens=8, token_s=[2.0]
    )
    assert requests_of([whole, cut]) == {
        "arrived": [1.0, 1.5],
        "prompt": [70, 0],
        "output": [2, 8],
        "max_output": [9, 8],
        "rate": [5.0, 6.0],
        "pauses": [[], [(3.0, 13.0)]],
    }


def test_waits_are_kept_of_each_request() -> None:
    """A token a second for one who reads five; and one whose second token never came."""
    whole = StreamLog(index=0, due_s=1.0, person=Person(5.0), output_tokens=2, prompt_tokens=70)
    whole.token_s, whole.end_s = [2.0, 3.0], 3.0
    cut = StreamLog(index=1, due_s=1.5, person=Person(5.0), output_tokens=8, token_s=[2.0])
    assert waits_of([whole, cut], horizon_s=10.0) == {"ttft_s": [1.0, 0.5], "stall_s": [0.8, 7.8]}


def test_the_page_of_html_has_everything_in_it() -> None:
    """Pictures, every table, the data; each picture says which seed and command made it."""
    document = result(TINY)
    for table in document["tables"]:
        table.update(words="a tiny model", readers=30)
        for run in table["cases"]["case"]:
            run.update(objection=None, driver={"lag_p99_ms": 1.0, "cpu_share": 0.1})
            run["figures"]["after_pause"] = None
        table["cases"]["case"][0]["timeline"] = TIMELINE
    head = {
        "at": "today",
        "seed": 7,
        "command": "make proof",
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"commit": "abc"},
    }
    comparisons = validate(document, {"laptop-tiny": TINY})
    plots = proof_plots(document | head, comparisons)
    assert [plot.name for plot in plots] == [
        "proof-tiny",
        "proof-smollm2",
        "proof-readers-tiny-1.2",
        "proof-readers-smollm2-1.2",
        "proof-simulator",
    ]
    assert all("Seed 7; `make proof`." in plot.words for plot in plots)
    text = html(document | head, [TINY], comparisons, plots)
    assert text.count("data:image/png;base64,") == 5
    assert "4 of 4 figures within 15 %" in text
    data = text.partition('type="application/json">')[2].partition("</script>")[0]
    assert json.loads(data)["seed"] == 7
    assert "http" not in text.replace(data, "")


def test_machines_are_shown_in_milliseconds() -> None:
    row = machine_table([replace(TINY, prefill_per_token_s=0.5e-3)]).rows[0]
    assert row[1] == f"{1000 * TINY.step_base_s:.2f} ms"
    assert row[5] == "50.00 ms"
