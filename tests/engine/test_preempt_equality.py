"""Preempted at random, in every way there is, and nobody can tell: the same tokens as without.

The model's output hardly repeats itself (`support.tiny_model`), so that a wrong KV cache shows at the next
token; the negative control shows that it does. The engine's own memory checks are on at every step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from support.equality import LIMIT_S, REQUESTS, NewEngine, assert_equal, chaotic, differing, run_twice
from support.generation import Ask, asks, flush, generate_all, use_policy
from support.probed_launch import MIXED
from support.raw_link import RawLink
from support.real_engine import RealEngine
from tokenflow_engine.protocol import EngineStats, Welcome

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]

thorough = pytest.mark.skipif(
    os.environ.get("TOKENFLOW_THOROUGH") != "1", reason="`make soak` runs every configuration"
)


@pytest.fixture(scope="module")
def pressed(new_engine: NewEngine) -> Iterator[RealEngine]:
    """Overlap loop, pages of 16, chunked prompts, and half the memory that all would need."""
    with chaotic(new_engine) as engine:
        yield engine


def test_every_way_out_and_back_under_memory_pressure(pressed: RealEngine):
    """Shared prefixes too, and log-probabilities, which every third request wants."""
    expected, found, after = run_twice(pressed, seed=1)
    assert_equal(expected, found)
    assert {"resumed", "offloaded", "loaded", "recomputed"} <= after.preemptions.keys()
    assert after.loaded_bytes > 0
    assert any(answer.logprobs for answer in found)
    assert share_free_by("1", after) > 0.5, "in the next pass: a result under way is awaited first"


def share_free_by(last_pass: str, stats: EngineStats) -> float:
    """Of streams that host memory had when they were to leave the device: whose memory was free by then."""
    counts = stats.synced_evictions
    return sum(count for passes, count in counts.items() if passes <= last_pass) / sum(counts.values())


def test_the_normal_loop_with_pages_of_one_token_and_mixed_passes(new_engine: NewEngine):
    args = ["--disable-overlap-schedule", "--page-size", "1", "--enable-mixed-chunk"]
    with chaotic(new_engine, *args, moves="2") as engine:
        expected, found, after = run_twice(engine, seed=3)
        assert_equal(expected, found)
        assert {"resumed", "offloaded", "loaded", "recomputed"} <= after.preemptions.keys()
        assert share_free_by("0", after) > 0.5, "in the same pass"


@thorough
def test_penalties_are_exact_beside_preempted_streams_in_the_normal_loop(new_engine: NewEngine):
    """With the overlap loop they are not, on the stock engine either: docs/structures.md says why."""
    penalties: tuple[dict[str, object], ...] = (
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 1.2, "presence_penalty": 0.5},
        {"min_new_tokens": 15},
    )
    crowd = asks(REQUESTS, seed=4)
    fixed = range(0, REQUESTS, 4)
    wanted = [replace(ask, sampling=penalties[i % 3]) if i in fixed else ask for i, ask in enumerate(crowd)]
    with chaotic(new_engine, "--disable-overlap-schedule", moves="4") as engine:
        expected, found, _ = run_twice(engine, seed=4, wanted=wanted, fixed=fixed)
    assert_equal(expected, found)


def test_a_grammar_is_never_preempted_and_counted_where_it_stands_in_the_way(pressed: RealEngine):
    """Two of three requests have one, and the longest answers, so that memory is wanted of them, too."""
    grammar = {"regex": "[a-z ]+", "ignore_eos": False}
    fixed = [i for i in range(REQUESTS) if i % 3]
    wanted = [
        Ask(f"{i} says " + "import os " * 60, 110, sampling=grammar) if i in fixed else ask
        for i, ask in enumerate(asks(REQUESTS, seed=9))
    ]
    for seed in (9, 10, 11):  # whether one of them stands in the way is chance
        expected, found, after = run_twice(pressed, seed=seed, wanted=wanted, fixed=fixed)
        assert_equal(expected, found)
        if "fixed_grammar" in after.preemptions:
            break
    assert after.preemptions["fixed_grammar"] > 0


def run_every_policy(engine: RealEngine, wanted: list[Ask]) -> None:
    """With readers known to the engine, as if a gateway had opened the streams."""
    with RawLink(engine.link, secret=engine.secret) as link:
        welcome = link.hello()
        assert isinstance(welcome, Welcome)
        use_policy(link, "fcfs")
        expected = generate_all(engine, link, wanted, tag="fcfs", announce=True)
        before = link.next(EngineStats).preemptions
        for policy in set(welcome.policies) - {"fcfs"}:
            flush(engine)
            use_policy(link, policy)
            found = generate_all(engine, link, wanted, tag=policy, announce=True)
            assert_equal(expected, found)
            use_policy(link, "fcfs")
        stats = link.next(EngineStats)
    assert (stats.hook_errors, stats.plan_errors) == (0, 0)
    assert sum(stats.preemptions.values()) > sum(before.values())


def test_the_policies_that_ship_change_who_waits_and_no_token(pressed: RealEngine):
    run_every_policy(pressed, asks(REQUESTS, seed=6))


def without_logprobs(wanted: list[Ask]) -> list[Ask]:
    """SGLang mixes no pass in which anybody wants them."""
    return [replace(ask, top_logprobs=None) for ask in wanted]


@thorough
def test_passes_that_mix_prompts_and_decoding(new_engine: NewEngine):
    wanted = without_logprobs(asks(REQUESTS, seed=7))
    with chaotic(new_engine, "--enable-mixed-chunk", moves="7", probed=True) as engine:
        expected, found, after = run_twice(engine, seed=7, wanted=wanted)
        assert_equal(expected, found)
        assert {"resumed", "loaded", "recomputed"} <= after.preemptions.keys()
        assert MIXED in engine.log()
        run_every_policy(engine, wanted)


@thorough
def test_seeded_sampling_draws_the_same_tokens(new_engine: NewEngine):
    """The draw depends on the request's seed and on the position, and on nothing that preemption changes.

    Every request with parameters of its own: what belongs to whom has to survive that the batch changes. Not
    with top_p or top_k: then SGLang draws by rank, for the whole batch, which the noise of sums can change.
    """
    kinds: tuple[dict[str, object], ...] = ({}, {"logit_bias": {"7": 2.0, "9": -100.0}})
    wanted = [
        replace(ask, sampling={"temperature": 1.0 + i / 20, "sampling_seed": 8000 + i, **kinds[i % 2]})
        for i, ask in enumerate(asks(REQUESTS, seed=8))
    ]
    with chaotic(new_engine, "--enable-deterministic-inference", moves="8", probed=True) as engine:
        expected, found, after = run_twice(engine, seed=8, wanted=wanted)
        assert_equal(expected, found)
        assert {"resumed", "loaded", "recomputed"} <= after.preemptions.keys()
        others = [replace(ask, sampling={**ask.sampling, "sampling_seed": i}) for i, ask in enumerate(wanted)]
        with RawLink(engine.link, secret=engine.secret) as link:
            link.hello()
            drawn_again = generate_all(engine, link, others, tag="others")
        assert len(differing(expected, drawn_again)) == REQUESTS


def test_with_host_memory_corrupted_the_comparison_fails(new_engine: NewEngine):
    """The negative control: KV that was zeroed in host memory comes back, and the text is another."""
    env = {"TOKENFLOW_FAULT": "corrupt_kv"}
    args = ["--disable-radix-cache"]  # or some streams would come back from the prefix cache
    with chaotic(new_engine, *args, moves="3:evict,load", env=env) as engine:
        expected, found, _ = run_twice(engine, seed=4)
        assert len(differing(expected, found)) > REQUESTS // 2


@thorough
@pytest.mark.parametrize(
    ("args", "env", "ways_back"),
    [
        (["--page-size", "1"], {}, {"loaded"}),
        (["--enable-mixed-chunk"], {}, {"loaded"}),
        (["--disable-overlap-schedule"], {}, {"loaded"}),
        (["--disable-radix-cache"], {}, {"loaded"}),
        (["--page-size", "1", "--disable-radix-cache", "--disable-overlap-schedule"], {}, {"loaded"}),
        (["--schedule-policy", "lpm"], {}, {"loaded"}),
        ([], {"TOKENFLOW_HOST_KV_TOKENS": "0"}, {"dropped"}),
        ([], {"TOKENFLOW_HOST_KV_TOKENS": "512"}, {"dropped", "loaded"}),
        (["--disable-radix-cache"], {"TOKENFLOW_FAULT": "fail_kv"}, {"failed_loads"}),
        ([], {"SGLANG_TEST_RETRACT": "1"}, {"loaded"}),
        (["--tp-size", "2"], {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, {"loaded"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_other_configurations(
    new_engine: NewEngine, args: list[str], env: dict[str, str], ways_back: set[str]
):
    with chaotic(new_engine, *args, moves="5", env=env) as engine:
        expected, found, after = run_twice(engine, seed=5)
        assert_equal(expected, found)
        assert ways_back <= after.preemptions.keys()
