"""`tokenflow sim`: spellings, set-ups, the fluid limit by hand, the same command twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tokenflow_bench import costs, kept, pool
from tokenflow_bench.bound import fluid_limit, least_ttft_p99_s, least_ttft_s, least_work_s
from tokenflow_bench.calibrate.machine import toml_entry
from tokenflow_bench.cases import BOUND, Case
from tokenflow_bench.costs import MACHINES
from tokenflow_bench.crowds import crowd
from tokenflow_bench.kept import Kept
from tokenflow_bench.pool import run_all
from tokenflow_bench.recorded import Recorded
from tokenflow_bench.report.groups import places_of, sections_of
from tokenflow_bench.setups import SETUPS
from tokenflow_bench.sim import sim
from tokenflow_bench.simulator import Part, simulate
from tokenflow_bench.timelines import timeline
from tokenflow_bench.variants import Variant
from tokenflow_bench.workload import Workload
from tokenflow_engine.policy.registry import policy_named

FLAT = replace(
    MACHINES["4090"],
    step_base_s=0.010,
    step_per_stream_s=0.001,
    step_per_context_token_s=1e-6,
    prefill_base_s=0.005,
    prefill_per_token_s=0.0001,
    kv_tokens=1000,
    max_running=8,
)


def requests(*arrived: float, prompt: int = 100, output: int = 100, rate: float = 10.0) -> Workload:
    count = len(arrived)
    return Workload.of(
        np.array(arrived), np.full(count, prompt), np.full(count, output), np.full(count, rate)
    )


@pytest.mark.parametrize(
    ("text", "policy", "mixed", "without"),
    [
        ("stock", "fcfs", False, ()),
        ("stock+mixed", "fcfs", True, ()),
        ("adaptive", "adaptive", True, ()),
        ("adaptive-mixed", "adaptive", False, ()),
        ("andes-offload", "andes", True, (Part.OFFLOAD,)),
        ("adaptive-reports-writes:least_s=1", "adaptive", True, (Part.REPORTS, Part.WRITES)),
    ],
)
def test_variants_are_spelled(text: str, policy: str, mixed: bool, without: tuple[Part, ...]) -> None:
    variant = Variant.parse(text)
    assert (variant.policy, variant.mixed, variant.without) == (policy, mixed, without)


@pytest.mark.parametrize(
    "text", ["nothing", "adaptive+offload", "adaptive-wings", "adaptive:wings=1", "adaptive:least_s=soon", ""]
)
def test_what_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no policy|none of|is there|option|readers|number"):
        Variant.parse(text)


def test_readers_are_spelled() -> None:
    rng = np.random.default_rng(1)
    steady = requests(*np.arange(40.0))
    changed = crowd("pauses:2/1+machines:0.5")(steady, rng)
    assert 10 <= changed.machine.sum() <= 30
    assert all(len(spans) > 0 for spans in changed.spans)
    assert not crowd("steady")(steady, rng).spans
    assert {sla.name for sla in crowd("classes")(steady, rng).classes} == {"premium", "standard", "economy"}
    for wrong in ("nobody", "pauses:often", "steady+pauses"):
        with pytest.raises(ValueError, match=r"no policy|none of|is there|option|readers|number"):
            crowd(wrong)


@pytest.mark.parametrize("name", ["4090-a", "h200-human", "4090-gamma", "4090-azure", "tiny-poisson"])
def test_load_is_the_share_of_what_the_engine_can_do(name: str) -> None:
    """What arrives takes the engine `load` of the time in which it is read, or in which it comes."""
    setup = SETUPS[name]
    workload = setup.workload(0.5, 1)
    busy_s = least_work_s(setup.machine, workload)
    if setup.arrivals == "burst":
        demand = float(workload.rate.sum()) / (float(workload.output.sum()) / busy_s)
    else:
        demand = busy_s / float(workload.arrived[-1])
    assert demand == pytest.approx(0.5, rel=0.25)


def test_set_ups_of_the_paper_keep_its_arrivals() -> None:
    assert [len(SETUPS[f"4090-{letter}"].at_rates({20.0: 1.0}, 1)) for letter in "abcd"] == [60, 80, 60, 120]
    assert [len(SETUPS[f"h200-{letter}"].at_rates({20.0: 1.0}, 1)) for letter in "abcd"] == [
        400,
        200,
        150,
        300,
    ]
    rates = SETUPS["4090-b"].at_rates({15.0: 0.4, 20.0: 0.6}, 1).rate
    assert set(rates.tolist()) == {15.0, 20.0}


def test_a_machine_with_a_field_too_many_is_named(tmp_path: Path) -> None:
    path = tmp_path / "machines.toml"
    path.write_text("[odd]\nwings = 2\n")
    with pytest.raises(ValueError, match=r"machines.toml: \[odd\]: .*wings"):
        costs.read_machines(path)


def test_the_least_work_by_hand() -> None:
    """30,000 context tokens would fit into 30 steps, but a stream of 100 tokens takes 100."""
    work_s = 100 * 0.010 + 200 * 0.001 + 30_000 * 1e-6 + 200 * 0.0001
    assert least_work_s(FLAT, requests(0.0, 0.0)) == pytest.approx(work_s)


def test_memory_bounds_the_least_work() -> None:
    """20 such answers: 300,000 context tokens at 1,000 a step."""
    work_s = 300 * 0.010 + 2000 * 0.001 + 300_000 * 1e-6 + 2000 * 0.0001
    assert least_work_s(FLAT, requests(*[0.0] * 20)) == pytest.approx(work_s)


def test_prefills_one_after_the_other_bound_the_first_token() -> None:
    """10 ms each: 10, 20, 30 on average, and the base of one; one that comes later waits for nobody."""
    assert least_ttft_s(FLAT, requests(0.0, 0.0, 0.0)) == pytest.approx(0.020 + 0.005)
    assert least_ttft_s(FLAT, requests(0.0, 5.0)) == pytest.approx(0.010 + 0.005)


def test_the_fluid_limit_of_an_overload_by_hand() -> None:
    """C tokens a second for readers who want 2 C: token x is read x / C in, and wanted x / 2 C in."""
    workload = requests(*[0.0] * 20)
    capacity = 2000 / least_work_s(FLAT, workload)
    twice = replace(workload, rate=np.full(20, 2 * capacity / 20))
    limit = fluid_limit(FLAT, twice)
    whole_s = 2000 / capacity
    assert limit.raw_tokens_per_s == pytest.approx(capacity)
    assert limit.wait_mean_s == pytest.approx(whole_s / 4, rel=0.01)
    assert limit.consumed_tokens_per_s == pytest.approx(capacity, rel=0.01)
    assert fluid_limit(FLAT, replace(workload, rate=np.full(20, capacity / 40))).wait_mean_s == 0.0


def test_readers_slow_the_prefills_after_theirs() -> None:
    """Two prompts of 10 ms. During the second one the first reader takes 10.5 % of the engine, and soon more.

    50 (0.001 + (1e-6 + 0.010 / 1000) (100 + 50 u)) of it u seconds on.
    """
    burst = requests(0.0, 0.0, rate=50.0)
    seconds = 0.010 / (1 - 0.105)
    assert least_ttft_p99_s(FLAT, burst) == pytest.approx(0.010 + seconds + 0.005, abs=1e-4)
    assert fluid_limit(FLAT, burst).ttft_p99_s == least_ttft_p99_s(FLAT, burst)
    assert fluid_limit(FLAT, requests(0.0, 1.0)).ttft_p99_s is None


def test_who_reads_faster_than_the_engine_writes_lets_nobody_in_before_the_end() -> None:
    """1,000 tokens a second take 2.1 of the engine, for the 0.1 s that the answer lasts."""
    assert least_ttft_p99_s(FLAT, requests(0.0, 0.0, rate=1000.0)) == pytest.approx(
        0.010 + 0.1 + 0.010 + 0.005, abs=1e-6
    )


@pytest.mark.parametrize("policy", ["stock", "andes", "tokenflow", "adaptive"])
def test_no_policy_beats_the_limit_on_a_burst(policy: str) -> None:
    limit = Case(setup="tiny-burst", load=1.2, policy=BOUND, seed=1).run()["figures"]
    figures = Case(setup="tiny-burst", load=1.2, policy=policy, seed=1).run()["figures"]
    assert figures["raw_tokens_per_s"] <= limit["raw_tokens_per_s"]
    assert figures["ttft_mean_s"] >= limit["ttft_mean_s"]
    assert figures["ttft_p99_s"] >= limit["ttft_p99_s"] or figures["stall_free_share"] < 1


def test_the_same_case_gives_the_same_figures_on_any_number_of_cores() -> None:
    cases = [
        Case(setup="smollm2-burst", load=1.2, policy=policy, seed=seed, readers="pauses+classes")
        for policy in ("stock", "adaptive")
        for seed in (1, 2)
    ]
    once = run_all(cases, jobs=1, say=print)
    assert run_all(cases, jobs=2, say=print) == once
    assert once[0] != once[1], "another seed is another run"


def test_what_was_interrupted_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case that is done is not run again, unless the code has changed; half a line is no result."""
    done, other = (Case(setup="tiny-burst", load=0.5, policy=BOUND, seed=seed) for seed in (1, 2))
    path = tmp_path / "kept.jsonl"
    (first,) = run_all([done], jobs=1, say=print, kept=Kept(path))
    path.write_text(path.read_text() + '{"code": "hal')
    ran: list[Case] = []
    monkeypatch.setattr(pool, "_run", lambda case: ran.append(case) or case.run())
    said: list[str] = []
    both = run_all([other, done], jobs=1, say=said.append, kept=Kept(path))
    assert (ran, both[1]) == ([other], first)
    assert said == ["1 of them are done already"]
    monkeypatch.setattr(kept, "_code", lambda: "of another day")
    run_all([done], jobs=1, say=print, kept=(again := Kept(path)))
    assert ran == [other, done]
    again.forget()
    assert not path.exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_is_named(jobs: int) -> None:
    with pytest.raises(KeyError) as error:
        run_all([Case(setup="nowhere", load=1.0, policy="stock", seed=9)], jobs=jobs, say=print)
    assert "seed=9" in error.value.__notes__[0]


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = "--setup smollm2-burst --load 1.2 --policy stock --policy bound --seed 1 --timeline --jobs 1"
    result = CliRunner().invoke(sim, [*arguments.split(), "--out", str(path)])
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert [case["policy"] for case in document["cases"]] == ["stock", "bound"]
    assert document["seeds"] == [1]
    assert {"machine", "versions", "command", "at"} <= document.keys()
    drawn = document["cases"][0]["timeline"]
    assert len(drawn["ttft_s"]) == document["cases"][0]["figures"]["streams"]
    assert len(drawn["engine"]["at_s"]) == len(drawn["engine"]["waiting"]) > 10
    assert "stock" in result.output


def test_a_set_up_runs_on_a_calibrated_machine(tmp_path: Path) -> None:
    """The one of its own machine's name, else the only one; with neither, one line says so."""
    slow = replace(MACHINES["laptop-tiny"], step_base_s=0.5, name="laptop-tiny")
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(toml_entry(replace(slow, name="mine")))
    two.write_text(toml_entry(replace(MACHINES["4090"], name="other")) + toml_entry(slow))
    arguments = ["--setup", "tiny-burst", "--load", "0.8", "--policy", "stock", "--seed", "1", "--jobs", "1"]
    raw = {}
    for path in (one, two):
        result = CliRunner().invoke(
            sim, [*arguments, "--machines", str(path), "--out", str(out := tmp_path / "out.json")]
        )
        assert result.exit_code == 0, result.output
        (case,) = json.loads(out.read_text())["cases"]
        assert case["machine"]["step_base_s"] == 0.5
        raw[path] = case["figures"]["raw_tokens_per_s"]
    assert raw[one] == raw[two]
    refused = CliRunner().invoke(sim, ["--setup", "4090-a", "--policy", "stock", "--machines", str(two)])
    assert refused.exit_code == 2
    assert "needs a [4090]" in refused.output


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d},{prompt},40\n" for second, prompt in enumerate([60, 5000, 60, 60, 60])
)


def simulated_trace(tmp_path: Path, text: str, *arguments: str) -> tuple[Any, str]:
    """The document and what was said."""
    path, out = tmp_path / "mine.v2.csv", tmp_path / "out.json"
    path.write_text(text)
    given = [
        "--trace",
        str(path),
        "--machine",
        "laptop-tiny",
        "--policy",
        "stock",
        "--seed",
        "1",
        "--jobs",
        "1",
    ]
    result = CliRunner().invoke(sim, [*given, "--out", str(out), *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text()), result.output


def test_a_trace_is_replayed_at_its_own_pace(tmp_path: Path) -> None:
    """What is longer than the memory is left out, and that is said; the last request comes after 4 s."""
    document, said = simulated_trace(tmp_path, TRACE)
    (case,) = document["cases"]
    assert (case["setup"], case["figures"]["streams"], case["figures"]["whole"]) == ("mine", 4, 4)
    assert 4.0 < case["figures"]["makespan_s"] < 6.0
    assert "1 requests left out: longer than the memory of laptop-tiny" in said
    assert "mine, its own pace" in said
    twice = simulated_trace(tmp_path, TRACE, "--faster", "2", "--policy", "bound")[0]
    assert 2.0 < twice["cases"][0]["figures"]["makespan_s"] < 4.0
    assert places_of(twice, sections_of(twice)[0])[0].name == "mine, 2x its pace"


def test_a_trace_comes_at_the_load_that_is_asked_for(tmp_path: Path) -> None:
    document, said = simulated_trace(tmp_path, TRACE, "--load", "0.5", "--end", "10", "--streams", "4")
    recorded = Recorded(path=str(tmp_path / "mine.v2.csv"), end_s=10.0, streams=4)
    machine = MACHINES["laptop-tiny"]
    work = recorded.workload(machine, 0.5, seed=1)
    assert len(work) == document["cases"][0]["figures"]["streams"] == 3
    assert least_work_s(machine, work) / float(work.arrived[-1]) == pytest.approx(0.5)
    assert "mine, load 0.5" in said


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (TRACE, "--setup 4090-a", "not both"),
        (TRACE, "--machine nowhere", "no 'nowhere'"),
        (TRACE, "--begin 100", "no answered request between"),
        ("what is this", "", "none of"),
        (
            '[{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hello"}]}]',
            "",
            "no times",
        ),
        (TRACE.replace(",60,", ",6000,"), "--machine laptop-tiny", "no request fits"),
        (TRACE, "--load 1 --streams 1", "no pace gives a load"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_one_line(
    tmp_path: Path, text: str, arguments: str, words: str
) -> None:
    (path := tmp_path / "trace").write_text(text)
    result = CliRunner().invoke(sim, ["--trace", str(path), "--policy", "stock", *arguments.split()])
    assert result.exit_code in (1, 2)
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        "--setup nowhere",
        "--policy nobody",
        "--policy adaptive:wings=1",
        "--readers ghosts",
        "--sla gold",
        "--load 0",
    ],
)
def test_bad_arguments_are_one_line(arguments: str) -> None:
    result = CliRunner().invoke(sim, arguments.split())
    assert result.exit_code == 2
    assert "Error: Invalid value" in result.output


def test_a_timeline_of_nobody_is_empty() -> None:
    outcome = simulate(FLAT, requests(5.0), policy_named("fcfs"), until_s=1.0, sample_s=0.1)
    assert timeline(outcome)["streams"] == []
