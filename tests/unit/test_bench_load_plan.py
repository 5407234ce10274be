"""From options to a workload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tokenflow_bench.load.plan import ARRIVALS, LENGTHS, PEOPLE, Plan, PlanError
from tokenflow_bench.sla import parse_sla
from tokenflow_bench.workload import Workload

BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{10 * row},M,{100 + row},{200 + row},0,x\n" for row in range(9)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(BURSTGPT)
    return path


def columns(work: Workload) -> list[object]:
    return [work.arrived.tolist(), work.prompt.tolist(), work.output.tolist(), work.rate.tolist(), work.spans]


@pytest.mark.parametrize("arrivals", ARRIVALS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_arrivals_and_lengths(trace: Path, arrivals: str, lengths: str) -> None:
    """In every combination; the same seed gives the same, another one another."""
    plan = Plan(arrivals=arrivals, lengths=lengths, streams=6)
    if "trace" in (arrivals, lengths):
        plan = replace(plan, trace=trace)
    work = plan.workload()
    assert len(work) == 6
    assert columns(work) == columns(plan.workload()) != columns(replace(plan, seed=2).workload())
    assert (work.arrived.tolist() == [0, 10, 20, 30, 40, 50]) == (arrivals == "trace")
    assert (work.output.tolist() == [200, 201, 202, 203, 204, 205]) == (lengths == "trace")


@pytest.mark.parametrize("people", PEOPLE)
def test_people(people: str) -> None:
    work = Plan(people=people, rate=8.0).workload()
    assert work.machine.all() == (people == "machine")
    assert bool(work.spans) == (people == "scanning")
    assert (len(set(work.rate)) == 1) == (people == "fixed")
    if people != "machine":
        assert 6 < sorted(work.rate)[25] < 10


def test_lengths_come_with_a_trace_s_arrivals(trace: Path) -> None:
    window = Plan(arrivals="trace", trace=trace, begin_s=20, end_s=60)
    work = replace(window, faster=2, length_scale=0.5, most_tokens=52).workload()
    assert columns(work)[:3] == [[0, 5, 10, 15], [51, 52, 52, 52], [52] * 4]


def test_who_listens_does_so_at_the_pace_of_speech() -> None:
    heard, read = Plan(people="listening").workload(), Plan().workload()
    assert heard.rate.mean() < read.rate.mean()


def test_classes_and_machines() -> None:
    mix = (parse_sla("premium:1"), parse_sla("economy:1"))
    work = Plan(streams=400, classes=mix, machines=0.5).workload()
    assert {sla.name for sla in work.classes} == {"premium", "economy"}
    assert 120 < work.machine.sum() < 280


def test_what_does_not_go_together(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="need --trace FILE"):
        Plan(arrivals="trace").workload()
    with pytest.raises(PlanError, match="needs --arrivals trace or --lengths trace"):
        Plan(trace=trace).workload()
    timeless = tmp_path / "sharegpt.json"
    timeless.write_text(
        '[{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hello"}]}]'
    )
    with pytest.raises(PlanError, match="has no times"):
        Plan(arrivals="trace", trace=timeless).workload()
    assert len(Plan(arrivals="poisson", lengths="trace", trace=timeless).workload()) == 1
