"""Reports: goals judged by hand, groups and spreads, a page that needs nothing from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tokenflow_bench.cases import Case
from tokenflow_bench.paper import __main__ as paper
from tokenflow_bench.paper import goals
from tokenflow_bench.paper.goals import GOALS, goal_cases, verdicts
from tokenflow_bench.paper.sections import SECTIONS, cases_of
from tokenflow_bench.report.cli import report
from tokenflow_bench.report.goals import goals_summary, goals_table, goals_words
from tokenflow_bench.report.groups import places_of, sections_of
from tokenflow_bench.report.sections import whole_table
from tokenflow_bench.report.worse import worse_table
from tokenflow_bench.report.write import write_report
from tokenflow_bench.setups import SETUPS
from tokenflow_bench.variants import Variant

HEAD = {
    "at": "2026-01-01T00:00:00Z",
    "command": "tokenflow sim",
    "machine": {"cpu": "a CPU", "cores": 2},
    "versions": {"commit": "abc"},
    "seeds": [1, 2, 3],
}


def figures_of(case: Case) -> Mapping[str, Any]:
    """Stock: 10 s, 100 tok/s. Adaptive: a tenth of it, and 10, 20, 30 % more. The limit: 3 s, 104 tok/s."""
    if case.policy == "bound":
        return {"ttft_p99_s": 3.0 if "human" in case.setup else None, "raw_tokens_per_s": 104.0}
    if case.policy == "stock":
        return dict.fromkeys(("ttft_p99_s", "ttft_mean_s"), 10.0) | {
            "raw_tokens_per_s": 100.0,
            "effective_tokens_per_s": 100.0,
            "stall_free_share": 0.5,
        }
    more = 100.0 + 10.0 * case.seed
    return {
        "ttft_p99_s": 1.0,
        "ttft_mean_s": 1.0,
        "raw_tokens_per_s": more,
        "effective_tokens_per_s": more,
        "stall_free_share": 0.97,
        "preemptions": 1.0,
        "classes": {"premium": {"ttft_p99_s": 1.5}},
    }


def test_goals_are_judged_on_medians_of_ratios() -> None:
    found = {(one.goal, one.setup): one for one in verdicts(figures_of, [1, 2, 3])}
    burst = found["burst, load 0.8", "4090-a"]
    assert burst.values == pytest.approx((0.1, 0.97, 1.2, 1.2))
    assert (burst.lows[2], burst.highs[2]) == pytest.approx((1.1, 1.3))
    assert burst.honest == (True, True, True, False), "effective throughput was to be 1.3 times stock's"
    assert burst.ambitious == (True, False, True, False)
    assert burst.limits == ("", "", "1.040", "")
    assert burst.shown[1:3] == ("stall-free 97.0%", "raw, of stock's 1.200 (1.100 to 1.300)")
    assert (burst.honest_seeds, burst.ambitious_seeds) == (1, 0), "1.3 times stock's with the third seed only"
    assert all(burst.in_reach)
    human = found["human rates, burst, load 0.8", "4090-human"]
    assert (human.limits, human.in_reach) == (("0.30", "", "1.040"), (False, True, False))
    premium = found["premium class, Azure 1.2", "4090-azure"]
    assert (premium.honest, premium.ambitious) == ((True,), (False,))
    assert len(found) == sum(len({setup for setup, _ in goal.places}) for goal in GOALS)


def test_a_goal_is_met_where_all_its_set_ups_meet_it() -> None:
    met = [
        goals.Verdict(
            goal="g",
            policy="adaptive",
            setup=name,
            load=1.0,
            values=(1.0,),
            lows=(1.0,),
            highs=(1.0,),
            shown=("x 1",),
            honest=(honest,),
            ambitious=(False,),
            limits=(limit,),
            in_reach=(limit != "3",),
            honest_seeds=2 if honest else 1,
            ambitious_seeds=0,
            why="for a reason",
        )
        for name, honest, limit in (("a", True, ""), ("b", False, "2"), ("c", False, "3"), ("d", False, ""))
    ]
    document: dict[str, Any] = {"seeds": [1, 2, 3], "goals": [asdict(one) for one in met]}
    summary = goals_summary(document)
    assert summary.startswith("Of 1 goals, 0 are met")
    assert "Of their 4 rows, 1 and 0; 1 have a figure out of reach" in summary
    rows = goals_table(document).rows
    assert [row[3] for row in rows] == ["met (2/3)", "missed (1/3)", "missed (1/3)", "missed (1/3)"]
    assert {row[4] for row in rows} == {"missed (0/3)"}
    assert [row[2] for row in rows] == [
        "x 1 (honest)",
        "x 1 MISSED (limit 2)",
        "x 1 MISSED, out of reach (limit 3)",
        "x 1 MISSED",
    ]
    assert goals_words(document) == ["g: for a reason"]
    assert not goals_words({"goals": document["goals"][:1]})


def _place(setup: str, policy: str, **figures: float) -> dict[str, Any]:
    usual = {"wait_mean_s": 1.0, "ttft_p99_s": 2.0, "stall_free_share": 0.9, "raw_tokens_per_s": 1000.0}
    return {"setup": setup, "policy": policy, "load": 1.0, "readers": "steady", "figures": usual | figures}


def test_all_that_is_worse_than_stock_is_named_and_nothing_else() -> None:
    ours: dict[str, dict[str, float]] = {
        "no difference": {},
        "little": {"wait_mean_s": 1.45, "ttft_p99_s": 2.19, "stall_free_share": 0.86},
        "later": {"wait_mean_s": 1.6},
        "halting and slow": {"stall_free_share": 0.84, "raw_tokens_per_s": 960.0},
    }
    cases = [_place(setup, "stock") for setup in ours]
    cases += [_place(setup, "adaptive", **figures) for setup, figures in ours.items()]
    cases.append(_place("stock alone", "stock"))
    assert worse_table({"cases": cases}).rows == [
        ["later, load 1", "1.60 (1.00) WORSE", "2.00 (2.00)", "0.90 (0.90)", "1,000 (1,000)"],
        ["halting and slow, load 1", "1.00 (1.00)", "2.00 (2.00)", "0.84 (0.90) WORSE", "960 (1,000) WORSE"],
    ]


def test_all_sections_are_made_of_what_exists() -> None:
    for section in SECTIONS:
        cases = cases_of(section, [1, 2])
        assert len(cases) > 4
        assert len(cases) == len(set(cases)), section.name
        for case in cases:
            assert case.setup in SETUPS
            assert case.policy == "bound" or Variant.parse(case.policy)
            assert (case.load is None) != (not case.rates)
    assert {case.seed for case in goal_cases(7)} == {7}


def _document(tmp_path: Path) -> dict[str, Any]:
    cases = [
        Case(setup="smollm2-burst", load=0.8, policy=policy, seed=seed, timeline=seed == 1).run()
        for policy in ("stock", "adaptive")
        for seed in (1, 2)
    ]
    document = HEAD | {"kind": "simulation", "seeds": [1, 2], "cases": cases}
    (tmp_path / "result.json").write_text(json.dumps(document))
    return document


def test_seeds_of_one_configuration_belong_together(tmp_path: Path) -> None:
    document = _document(tmp_path)
    (place,) = places_of(document, sections_of(document)[0])
    assert place.name == "smollm2-burst, load 0.8"
    assert {policy: len(cases) for policy, cases in place.cases.items()} == {"stock": 2, "adaptive": 2}
    ttft = [case["figures"]["ttft_mean_s"] for case in place.cases["stock"]]
    spread = place.figure("stock", "ttft_mean_s")
    assert (spread.low, spread.high) == (min(ttft), max(ttft))
    rows = whole_table(document, sections_of(document)[0]).rows
    assert [row[1] for row in rows] == ["stock", "adaptive"]


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    document = _document(tmp_path)
    result = CliRunner().invoke(report, [str(tmp_path / "result.json"), "--plots", str(tmp_path / "plots")])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "result.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', page)
    data = re.search(r'<script id="data" type="application/json">(.*)</script>', page)
    assert data is not None
    assert json.loads(data[1]) == document
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {f"{kind}-smollm2-burst-0.8.png" for kind in ("tokens", "buffers", "engine", "ttft")}
    assert all((tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_the_short_page_names_seeds_and_commands(tmp_path: Path) -> None:
    paths = list(write_report(_document(tmp_path), page=tmp_path / "results.md", html=tmp_path / "all.html"))
    page = (tmp_path / "results.md").read_text()
    assert "seeds 1, 2" in page
    assert "`tokenflow sim`" in page
    assert all(path.exists() for path in paths)
    assert "(img/tokens-smollm2-burst-0.8.png)" in page


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("{", "[]", '{"kind": "burst"}'):
        path.write_text(text)
        result = CliRunner().invoke(report, [str(path)])
        assert result.exit_code == 1
        assert "Error" in result.output


def test_the_paper_s_report_has_all_sections_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make paper` from end to end, with one small run in place of each of its own."""
    small = {
        who: Case(setup="smollm2-burst", load=0.8, policy=who, seed=1, timeline=True).run()
        for who in ("stock", "bound")
    }

    def run_small(cases: Sequence[Case], **_given: Any) -> list[dict[str, Any]]:
        results = []
        for case in cases:
            like = small["bound" if case.policy == "bound" else "stock"]
            figures = like["figures"] | {"classes": {"premium": {"ttft_p99_s": 3.0}}}
            named = {name: getattr(case, name) for name in ("setup", "policy", "seed", "readers", "rates")}
            load = {} if case.load is None else {"load": case.load}
            drawn = {"timeline": like["timeline"]} if case.timeline else {}
            results.append(named | load | drawn | {"figures": figures})
        return results

    monkeypatch.setattr(paper, "run_all", run_small)
    monkeypatch.setattr(paper, "_ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    arguments = ["--out", str(tmp_path / "paper.json"), "--seed", "1", "--seed", "2"]
    result = CliRunner().invoke(paper.main, arguments)
    assert result.exit_code == 0, result.output
    assert "MISSED" in result.output, "one and the same run is no better than stock"
    page = (tmp_path / "docs" / "results.md").read_text()
    for section in SECTIONS:
        assert section.name == "timelines" or f"## {section.title}\n" in page
    pictures = set(re.findall(r"\(img/([^)]+)\)", page))
    assert {"load.png", "pareto.png", "ablation.png", "tokens-4090-a-0.8.png"} <= pictures
    assert pictures == {path.name for path in (tmp_path / "docs" / "img").iterdir()}
    assert 'make paper ARGS="--section ablation --seed 1 --seed 2"' in page
    assert "## Where it is worse" in page

    def run_nothing(*_cases: Any, **_given: Any) -> None:
        pytest.fail("a run")

    monkeypatch.setattr(paper, "run_all", run_nothing)
    before = json.loads((tmp_path / "paper.json").read_text())
    assert f": {len(before['cases'])} runs in 0." in page, "how long it took is said"
    source = tmp_path / "source.json"
    source.write_text(json.dumps(before | {"goals": [], "cases": before["cases"][::-1]}))
    again = ["--from", str(source), "--out", str(tmp_path / "again.json")]
    result = CliRunner().invoke(paper.main, again)
    assert result.exit_code == 0, result.output
    after = json.loads((tmp_path / "again.json").read_text())
    assert after == before | {name: after[name] for name in ("judged_at", "judged_by")}
    judged_again = (tmp_path / "docs" / "results.md").read_text()
    assert re.sub(r"; goals and words of .*?(?=\. `make)", "", judged_again) == page != judged_again
    source.write_text(json.dumps(before | {"cases": before["cases"][1:]}))
    assert "the result lacks 1 runs" in CliRunner().invoke(paper.main, again).output
