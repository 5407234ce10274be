"""The parts of the experiment that need no engine: turns, sizes, capacity, traces, ratios, texts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tokenflow_bench.burst.capacity import middle_rate
from tokenflow_bench.burst.cores import Cores, pin, pin_engine
from tokenflow_bench.burst.deployment import parse_counters
from tokenflow_bench.burst.idle import ratios
from tokenflow_bench.burst.report import page, table_of, terminal
from tokenflow_bench.burst.setups import SETUPS
from tokenflow_bench.burst.targets import ratio
from tokenflow_bench.burst.turns import turns
from tokenflow_bench.experiment import objections
from tokenflow_bench.load.asks import asks_of, prompt_text
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.reading import Person
from tokenflow_bench.spread import median_interval


def test_each_round_begins_with_another_case() -> None:
    order = [case for _, case in turns("ABC", 4)]
    assert "".join(order) == "ABCBCACABABC"
    assert [number for number, _ in turns("AB", 2)] == [0, 0, 1, 1]


def test_capacity_leaves_start_and_end_out() -> None:
    """One token a second for a while, ten a second in the middle three fifths, then slowly to the end."""
    slow, fast = [0.0, 10.0], [20.0 + number / 10 for number in range(6)]
    tail = [30.0, 40.0]
    log = StreamLog(index=0, due_s=0, person=Person(1), output_tokens=10, token_s=[*slow, *fast, *tail])
    assert middle_rate([log]) == pytest.approx(6 / (30.0 - 20.0))
    assert middle_rate([log, log]) == pytest.approx(12 / (30.0 - 20.0))


def test_half_of_the_readers_fit() -> None:
    """Capacity for 40 readers: 20 whole streams of 320 tokens."""
    tiny = SETUPS["tiny"]
    assert tiny.readers(1.0, 700.0) == 40
    assert tiny.readers(0.8, 700.0) == 32
    assert tiny.kv_for(700.0, 320.0) == 6400
    assert tiny.kv_for(700.0, 321.0) % 16 == 0


def test_the_same_seed_gives_the_same_readers() -> None:
    tiny = SETUPS["tiny"]
    one, same, other = (asks_of(tiny.burst(5, seed=seed), seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_texts_share_no_prefix_and_have_their_length() -> None:
    rng = random.Random(1)  # noqa: S311
    texts = [prompt_text(40, rng, mark=f"{number}") for number in range(3)]
    assert [len(text.split()) for text in texts] == [40, 40, 40]
    assert len({text.split()[0] for text in texts}) == 3


def test_ratios_are_within_rounds() -> None:
    """0.5, 2 and 1 times stock of the same round: the median is 1, not that of the medians (4 / 2)."""
    assert ratio([1.0, 8.0, 4.0], [2.0, 4.0, 4.0]) == 1.0
    assert ratio([1.0, None], [0.0, 3.0]) is None


def burst_run(ttft: float) -> dict[str, Any]:
    names = {
        "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "wait_mean_s", "wait_p99_s", "stall_free_share",
        "good_share", "raw_tokens_per_s", "consumed_tokens_per_s", "effective_tokens_per_s", "qos",
        "qoe_mean", "lead_mean_s", "makespan_s", "missing",
    }  # fmt: skip
    return {
        "figures": dict.fromkeys(names, 1.0) | {"ttft_p99_s": ttft, "after_pause": None},
        "engine": {"tokenflow_engine_preemptions_total{parked}": 3.0},
        "driver": {"lag_p99_ms": 2.0, "cpu_share": 0.1},
        "objection": "",
    }


def test_table_has_ratios_against_stock() -> None:
    cases = {"fcfs": [burst_run(4.0), burst_run(8.0)], "adaptive": [burst_run(1.0), burst_run(4.0)]}
    shown = table_of({"cases": cases}).text()
    line = next(line for line in shown.splitlines() if line.startswith("TTFT, p99"))
    assert "6.00 (4.00 to 8.00)" in line
    assert "2.50 (1.00 to 4.00), x0.38" in line
    assert "preempted" in shown
    assert "after the pause" not in shown


def document(command: str, commit: str, **more: Any) -> dict[str, Any]:
    machine = {"cpu": "CPU", "cores": 2, "memory_gib": 8.0, "kernel": "6.1", "load_before": 0.25}
    versions = {"commit": commit, "sglang": "0.5.23"}
    head = {"command": command, "at": "2026-01-01T00:00:00Z", "seed": 1}
    return {**head, "machine": machine, "versions": versions, **more}


BURST = document(
    "make bench-burst",
    "aaa1111",
    target_s=1.0,
    tables=[
        {
            "setup": "tiny", "words": "a tiny model", "title": "load 0.8", "load": 0.8, "rounds": 1,
            "readers": [4], "rate": 5.0, "output": 100, "capacity": [30.0], "fit": [0.5], "flags": [],
            "cores": "core 0", "policies": {},
            "cases": {"fcfs": [burst_run(4.0)], "adaptive": [burst_run(1.0)]},
        }
    ],
)  # fmt: skip
IDLE_RUN = {"tokens_per_s": 100.0, "ttft_mean_s": 0.1}
IDLE = document(
    'make bench-burst ARGS="--idle"',
    "bbb2222",
    tables=[
        {
            "setup": "tiny", "title": "nobody waits", "sides": ["stock", "plugin"], "cores": "core 0",
            "figures": {"stock": [IDLE_RUN], "plugin": [IDLE_RUN]},
            "ratios": ratios([IDLE_RUN], [IDLE_RUN]),
            "idle_cores": {"stock": [0.01], "plugin": [0.01]},
            "alone_s": {"stock": [0.01], "plugin": [0.01]},
        }
    ],
)  # fmt: skip


@pytest.mark.parametrize("documents", [(BURST, IDLE), (IDLE, BURST)])
def test_results_of_both_kinds_become_one_page(documents: tuple[dict[str, Any], ...]) -> None:
    """Each with its own command and commit; the machine, the same for both, is there once."""
    shown = page(*documents)
    assert "`make bench-burst`: 2026-01-01T00:00:00Z, commit aaa1111" in shown
    assert '`make bench-burst ARGS="--idle"`: 2026-01-01T00:00:00Z, commit bbb2222' in shown
    assert shown.count("CPU, 2 cores") == 1
    assert shown.index("a tiny model, load 0.8") < shown.index("nobody waits: plugin / stock | 1 | x1.000")
    assert shown.index("In short") < shown.index("a tiny model, load 0.8")
    assert "nobody waits" in terminal(*documents)
    assert not any(map(objections, documents))


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    """Of samples of an uneven distribution with median 1, about one interval in twenty lies beside it."""
    draws = np.random.default_rng(1).exponential(1 / np.log(2), (400, 50))
    intervals = [median_interval(list(sample)) for sample in draws]
    assert 0.92 < np.mean([low <= 1.0 <= high for low, high in intervals]) < 0.99
    assert median_interval([3.0, 1.0]) == (1.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def test_a_page_says_nothing_of_what_was_not_measured() -> None:
    assert "nothing is to be scheduled" not in page(BURST)
    alone = page(IDLE)
    assert "nobody waits: plugin / stock" in alone
    assert "`fcfs` is stock" not in alone
    assert "In short" not in alone


def test_counters_of_the_engine() -> None:
    text = (
        "# TYPE tokenflow_engine_preemptions_total counter\n"
        'tokenflow_engine_preemptions_total{engine="e",kind="parked"} 3.0\n'
        'tokenflow_engine_written_bytes_total{engine="e"} 1.5e+06\n'
        'tokenflow_engine_running{engine="e"} 7.0\n'
        'tokenflow_engine_hook_errors{engine="e"} 0.0\n'
        'tokenflow_responses_total{route="/v1",status="200"} 9.0\n'
    )
    assert parse_counters(text) == {
        "tokenflow_engine_preemptions_total{parked}": 3.0,
        "tokenflow_engine_written_bytes_total": 1.5e6,
        "tokenflow_engine_hook_errors": 0.0,
    }


def test_what_preemption_came_to_is_shown() -> None:
    """8 returns from host memory in 4 s, one of them longer than a second; 3 of 4 tokens were synced."""
    text = "".join(
        f"{line}\n"
        for line in (
            'tokenflow_engine_return_seconds_bucket{engine="e",kind="loaded",le="0.5"} 6.0',
            'tokenflow_engine_return_seconds_bucket{engine="e",kind="loaded",le="1.0"} 7.0',
            'tokenflow_engine_return_seconds_bucket{engine="e",kind="loaded",le="+Inf"} 8.0',
            'tokenflow_engine_return_seconds_count{engine="e",kind="loaded"} 8.0',
            'tokenflow_engine_return_seconds_sum{engine="e",kind="loaded"} 4.0',
            'tokenflow_engine_stalls{engine="e",reason="ahead"} 2.0',
            'tokenflow_engine_stalls{engine="e",reason="memory"} 1.0',
            'tokenflow_engine_stall_s{engine="e",reason="ahead"} 0.5',
            'tokenflow_engine_evicted_tokens{engine="e"} 4000.0',
            'tokenflow_engine_evicted_synced_tokens{engine="e"} 3000.0',
        )
    )
    figures: dict[str, Any] = {"after_pause": None}
    run = {"figures": figures, "engine": parse_counters(text), "driver": {"lag_p99_ms": 1, "cpu_share": 0.1}}
    shown = table_of({"cases": {"adaptive": [run]}}).rows
    assert dict(map(tuple, shown)) == {  # type: ignore[arg-type]
        "of what had to leave, in host memory already, %": "75",
        "back from host memory, mean, ms": "500",
        "returns that took over a second": "1",
        "readers dry while preempted, as the engine sees it": "3",
        "their waiting, s": "0.5",
        "driver: lag, p99, ms": "1.0",
        "driver: CPU, % of a core": "10",
    }


def test_pins_processes() -> None:
    """All threads of a process; a group without a scheduler is no engine."""
    core = frozenset({min(os.sched_getaffinity(0))})
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        pin(process.pid, core)
        assert os.sched_getaffinity(process.pid) == core
        with pytest.raises(RuntimeError, match="no scheduler"):
            pin_engine(process.pid, Cores())
        process.communicate(b"\n")
