"""Costs learnt from steps: close to the truth after a few, and never negative."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tokenflow_engine.sglang.costs import MeasuredCosts


class NoHost:
    def load_s(self, tokens: float) -> float | None:
        return None

    def evict_s(self, tokens: float) -> float | None:
        return None


class Pass:
    """What is asked of a batch of SGLang."""

    def __init__(self, *, streams: int, tokens: int, is_prefill: bool = False) -> None:
        self.reqs = [None] * streams
        self.extend_num_tokens = tokens
        self.seq_lens_cpu: Any = SimpleNamespace(tolist=lambda: [tokens])
        self.forward_mode = SimpleNamespace(is_extend=lambda: is_prefill)


def truth_decode(streams: int, tokens: int) -> float:
    return 0.017 + 4e-5 * streams + 1.4e-7 * tokens


def truth_prefill(tokens: int) -> float:
    return 0.004 + 9e-5 * tokens


def learnt(steps: int = 600) -> MeasuredCosts:
    costs, now = MeasuredCosts(NoHost()), 0.0
    dice = random.Random(1)  # noqa: S311 - noise
    for i in range(steps):
        if i % 4 == 0:
            tokens = dice.randint(16, 2048)
            costs.launching(Pass(streams=1, tokens=tokens, is_prefill=True), now)
            now += truth_prefill(tokens) * dice.uniform(0.95, 1.05)
        else:
            streams, tokens = dice.randint(1, 128), dice.randint(1000, 100_000)
            costs.launching(Pass(streams=streams, tokens=tokens), now)
            now += truth_decode(streams, tokens) * dice.uniform(0.95, 1.05)
    costs.launching(None, now)
    return costs


@pytest.mark.parametrize(("streams", "tokens"), [(1, 2000), (64, 50_000), (128, 100_000)])
def test_a_decode_step_is_predicted_within_a_tenth(streams: int, tokens: int):
    assert learnt().decode_s(streams, tokens) == pytest.approx(truth_decode(streams, tokens), rel=0.1)


@pytest.mark.parametrize("tokens", [64, 512, 2048])
def test_a_prefill_is_predicted_within_a_fifth(tokens: int):
    assert learnt().prefill_s(tokens) == pytest.approx(truth_prefill(tokens), rel=0.2)


def test_without_host_memory_coming_back_costs_a_prefill():
    costs = learnt()
    assert costs.load_s(512) == costs.prefill_s(512)
    assert costs.evict_s(512) == 0.0


def test_an_idle_time_is_no_step():
    costs = MeasuredCosts(NoHost())
    before = costs.decode_s(8, 1000)
    costs.launching(None, 0.0)
    costs.launching(Pass(streams=8, tokens=1000), 100.0)
    costs.launching(Pass(streams=8, tokens=1000), 500.0)  # nor is a step of minutes
    assert costs.decode_s(8, 1000) == before


def test_odd_measurements_never_make_a_cost_negative():
    costs, now = MeasuredCosts(NoHost()), 0.0
    for streams, seconds in [(1, 0.5), (100, 0.01)] * 50:
        costs.launching(Pass(streams=streams, tokens=10 * streams), now)
        now += seconds
    assert costs.decode_s(100, 1_000_000) > 0


def test_a_time_with_few_streams_does_not_make_it_forget_what_many_cost() -> None:
    costs = learnt()
    now = 1e6
    for _ in range(1500):
        costs.launching(Pass(streams=2, tokens=500), now)
        now += truth_decode(2, 500)
    assert costs.decode_s(128, 100_000) == pytest.approx(truth_decode(128, 100_000), rel=0.1)


def test_an_engine_that_has_become_slower_is_noticed_soon() -> None:
    costs = learnt()
    now = 1e6
    for _ in range(60):
        costs.launching(Pass(streams=64, tokens=50_000), now)
        now += 2 * truth_decode(64, 50_000)
    assert costs.decode_s(64, 50_000) == pytest.approx(2 * truth_decode(64, 50_000), rel=0.25)


def test_what_turns_cost_is_told_apart() -> None:
    costs, now = MeasuredCosts(NoHost()), 0.0
    dice = random.Random(1)  # noqa: S311 - noise
    for i in range(600):
        streams, tokens, turns = dice.randint(1, 32), dice.randint(1000, 9000), i % 2 == 0
        costs.launching(Pass(streams=streams, tokens=tokens), now, moving_share=1e-6 if turns else None)
        now += truth_decode(streams, tokens) + 0.003 * turns
    assert costs.turn_s == pytest.approx(0.003, abs=0.001)
    assert costs.decode_s(32, 9000) == pytest.approx(truth_decode(32, 9000), rel=0.05)


def test_turns_are_taken_to_be_dear_until_they_were_seen() -> None:
    """With nobody on the move a step is as long as without turns, which says nothing."""
    costs, now = MeasuredCosts(NoHost()), 0.0
    for i in range(200):
        costs.launching(Pass(streams=20, tokens=5000), now, moving_share=0.0 if i % 2 else None)
        now += 0.02
    assert costs.turn_s == pytest.approx(0.003, rel=0.1)
    for _ in range(200):
        costs.launching(Pass(streams=20, tokens=5000), now, moving_share=1e-6)
        now += 0.02
    assert costs.turn_s < 0.001


def test_memory_on_the_move_makes_turns_dearer():
    costs, now = MeasuredCosts(NoHost()), 0.0
    for i in range(600):
        costs.launching(Pass(streams=20, tokens=5000), now, moving_share=0.1 if i % 2 else None)
        now += 0.018
    costs.launching(None, now)
    assert costs.turn_s == pytest.approx(0.002, abs=0.0005)
