"""A plan made without the crowd is the plan made with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.plans import NOW, Row, check, names, view_of
from tokenflow_bench.costs import MACHINES
from tokenflow_bench.views import random_view
from tokenflow_engine.policy import crowd as crowds
from tokenflow_engine.policy.adaptive import Adaptive
from tokenflow_engine.policy.base import EngineView, Phase
from tokenflow_engine.policy.crowd import Crowd
from tokenflow_engine.policy.options import Options
from tokenflow_engine.policy.planning import Planning
from tokenflow_engine.policy.slack import Line

OPTIONS = Options()


def crowded(seed: int, *, page_tokens: int = 16) -> EngineView:
    rng = np.random.default_rng(seed)
    view = random_view(
        rng,
        machine=replace(MACHINES["4090"], page_tokens=page_tokens),
        running=60,
        waiting=500,
        fill=[0.5, 0.9, 1.0][seed % 3],
        people=[0.5, 0.95, 1.0][seed // 3 % 3],
    )
    return replace(view, weight=np.ones(len(view))) if seed % 2 else view


@pytest.mark.parametrize("seed", range(24))
def test_the_crowd_changes_nothing(seed: int) -> None:
    view = crowded(seed, page_tokens=16 if seed % 4 else 1)
    assert Crowd.of(view, most=OPTIONS.most, patience_s=OPTIONS.patience_s) is not None
    plan = Adaptive().plan(view, names(view))
    check(view, plan)
    assert plan == Planning(view, OPTIONS).plan()


def test_it_would_show_if_too_many_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    of = Crowd.of
    monkeypatch.setattr(
        Crowd, "of", lambda view, *, most, patience_s: of(view, most=3, patience_s=patience_s)
    )
    plans = [(Adaptive().plan(view, []), Planning(view, OPTIONS).plan()) for view in map(crowded, range(24))]
    assert any(with_crowd != without for with_crowd, without in plans)


def test_who_has_begun_or_is_urgent_is_never_left_out() -> None:
    rows = [
        *[Row(phase=Phase.RUNNING) for _ in range(4)],
        *[Row(phase=Phase.WAITING, waited=1.0) for _ in range(200)],
        *[Row(phase=Phase.WAITING, machine=True, since=1.0) for _ in range(100)],
        Row(phase=Phase.WAITING, waited=30.0),
        Row(phase=Phase.WAITING, generated=7),
        Row(phase=Phase.OFFLOADED),
        Row(phase=Phase.WAITING, machine=True, since=30.0),
    ]
    view = view_of(*rows, max_running=8)
    crowd = Crowd.of(view, most=10, patience_s=10.0)
    assert crowd is not None
    rest = crowd.rest()
    assert crowd.kept.tolist() == [*range(4), *range(4, 13), *range(204, 213), *range(304, 308)]
    assert rest.phase.tolist() == view.phase[crowd.kept].tolist()
    assert (rest.kv_free, rest.now, len(rest)) == (view.kv_free, NOW, 26)


def test_where_all_could_run_there_is_no_crowd() -> None:
    view = view_of(*[Row(phase=Phase.WAITING) for _ in range(200)], max_running=200)
    assert Crowd.of(view, most=10, patience_s=10.0) is None


def test_due_tokens_are_counted_until_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "_AT_ONCE", 10)
    late = [Row(phase=Phase.WAITING, context=100, waited=50.0) for _ in range(100)]
    early = [Row(phase=Phase.WAITING, context=100, waited=0.0, ttft_target=1e6) for _ in range(100)]
    crowd = Crowd.of(view_of(*late, *early, max_running=8), most=10, patience_s=10.0)
    assert crowd is not None
    free = Line(0.0, 0.0)
    assert crowd.due_tokens(prefill=free, within_s=1.0, steps=4, enough=float("inf")) == 90 * 104
    assert crowd.due_tokens(prefill=free, within_s=1.0, steps=4, enough=1000) == 10 * 104
