"""What is run: sections of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tokenflow_bench.cases import BOUND, Case
from tokenflow_bench.paper.goals import goal_cases

__all__ = ["SECTIONS", "Section", "cases_of"]

_STOCK = ("stock", "stock+mixed")
_ALL = (*_STOCK, "andes-offload", "andes", "tokenflow", "adaptive", BOUND)
_SOME = ("stock", "andes", "tokenflow", "adaptive")
_PAPER_RATE = ((20.0, 1.0),)
_MIXED_RATES = ((15.0, 0.4), (20.0, 0.6))
_NO_GATE = "adaptive:efficiency=5"
_SWEEP = (0.5, 0.8, 1.0, 1.2, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Cases that belong together. `cases` makes those of one seed."""

    name: str
    title: str
    words: str
    cases: Callable[[int], Iterator[Case]]


def cases_of(section: Section, seeds: Sequence[int]) -> list[Case]:
    """All seeds, those of one configuration next to each other, nothing twice."""
    by_seed = [list(section.cases(seed)) for seed in seeds]
    return list(dict.fromkeys(case for same in zip(*by_seed, strict=True) for case in same))


def _paper(seed: int) -> Iterator[Case]:
    for machine, letter, policy in product(("4090", "4090-qwen", "h200"), "abcd", _ALL):
        yield Case(setup=f"{machine}-{letter}", rates=_PAPER_RATE, policy=policy, seed=seed)


def _rates(seed: int) -> Iterator[Case]:
    for setup, rate, policy in product(("4090-qwen-a", "h200-a"), (15.0, 25.0, 30.0), _SOME):
        yield Case(setup=setup, rates=((rate, 1.0),), policy=policy, seed=seed)
    mixed = (*(f"4090-qwen-{letter}" for letter in "abcd"), "h200-a", "h200-c")
    for setup, policy in product(mixed, _SOME):
        yield Case(setup=setup, rates=_MIXED_RATES, policy=policy, seed=seed)


def _tokenflow(seed: int) -> Iterator[Case]:
    intervals = [f"tokenflow:interval_s={interval}" for interval in (0.25, 0.5, 1.0, 1.5)]
    margins = [f"tokenflow:conservativeness={mu}" for mu in (1.0, 1.5, 2.0, 3.0)]
    for setup, policy in product(("4090-b", "4090-human"), (*intervals, *margins)):
        yield Case(setup=setup, load=0.8, policy=policy, seed=seed)


def _ablation(seed: int) -> Iterator[Case]:
    overload = (("4090-b", 1.2), ("h200-a", 1.2), ("h200-gamma", 1.2), ("4090-gamma", 1.5))
    adaptive = [f"adaptive{part}" for part in ("", "-offload", "-writes", "-overlap", "-mixed")]
    for (setup, load), policy in product(overload, ("stock", *adaptive, _NO_GATE)):
        yield Case(setup=setup, load=load, policy=policy, seed=seed)
    tokenflow = [f"tokenflow{part}" for part in ("", "-offload", "-writes", "-overlap")]
    for policy in ("stock", *tokenflow):
        yield Case(setup="4090-b", load=0.8, policy=policy, seed=seed)
    for policy in ("adaptive", "adaptive-reports"):
        yield Case(setup="4090-a", load=1.2, readers="pauses", policy=policy, seed=seed)


def _load(seed: int) -> Iterator[Case]:
    setups = ("4090-a", "4090-human", "4090-gamma", "h200-gamma", "4090-azure")
    policies = ("stock", "andes", "tokenflow", "adaptive", BOUND)
    for setup, load, policy in product(setups, _SWEEP, policies):
        yield Case(setup=setup, load=load, policy=policy, seed=seed)


def _traces(seed: int) -> Iterator[Case]:
    setups = ("a6000-gamma", "a6000-azure", "h200-azure")
    for setup, load, policy in product(setups, (0.8, 1.2), (*_STOCK, "andes", "tokenflow", "adaptive")):
        yield Case(setup=setup, load=load, policy=policy, seed=seed)


def _readers(seed: int) -> Iterator[Case]:
    policies = ("stock", "tokenflow", "adaptive", "adaptive-reports")
    crowds = ("pauses", "scanning", "pauses+classes", "machines:0.3")
    for (setup, load), who, policy in product((("4090-a", 0.8), ("4090-gamma", 1.2)), crowds, policies):
        yield Case(setup=setup, load=load, readers=who, policy=policy, seed=seed)
    for policy in ("stock", "tokenflow", "adaptive"):
        yield Case(setup="4090-azure", load=1.2, readers="classes", policy=policy, seed=seed)


def _limits(seed: int) -> Iterator[Case]:
    policies = (*_STOCK, "andes", "tokenflow", "adaptive")
    for policy in policies:
        yield Case(setup="4090-poisson", load=0.3, policy=policy, seed=seed)
        yield Case(setup="4090-a", load=3.0, policy=policy, seed=seed)
        yield Case(setup="4090-a", rates=((100.0, 1.0),), policy=policy, seed=seed)
        yield Case(setup="4090-gamma", load=1.2, readers="machines:1", policy=policy, seed=seed)


def _timelines(seed: int) -> Iterator[Case]:
    for policy in ("stock", "andes", "tokenflow", "adaptive"):
        yield Case(setup="4090-a", load=0.8, policy=policy, seed=seed, timeline=True)


SECTIONS = (
    Section(
        name="goals",
        title="Goals",
        words="What was to be reached against stock SGLang with its default flags, and whether it was: "
        "medians of the ratios of runs with one seed, in brackets their range. (honest): the first figure "
        "that was set is reached, not the ambitious one. Verdicts are on the medians; beside them in how "
        "many seeds all cells of the row are met. Limit: the fluid limit, of TTFT for readers who never "
        "wait; no policy is beyond it. `adaptive` is an engine with `--enable-mixed-chunk`, held to stock "
        "SGLang without it. Only `no queue` is without that flag on both sides: with it, TTFT where nobody "
        "waits is that of `stock+mixed` (see where it cannot help), which is beyond the bound of this row. "
        "So no one configuration meets all that is met here.",
        cases=goal_cases,
    ),
    Section(
        name="paper",
        title="The paper's set-ups",
        words="All readers at 20 tokens a second. The RTX 4090 with Llama-3-8B and with Qwen2-7B, to which "
        "the paper's figures for this card fit.",
        cases=_paper,
    ),
    Section(
        name="rates",
        title="Other reading rates",
        words="All at 15, 25, 30 tokens a second; and two in five at 15, the others at 20.",
        cases=_rates,
    ),
    Section(
        name="tokenflow",
        title="The paper's scheduler: interval and conservativeness",
        words="How often it decides (0.5 s by default), and how much a victim's reader must have left (mu, "
        "1.5 by default), on bursts that memory does not hold. Looked for with one seed, neither changes "
        "more than noise at 4090-a (load 0.8 and 0.9) and h200-b (0.8), mu nothing at 4090-gamma (0.8) "
        "either; and in overload this policy goes back to stock's order.",
        cases=_tokenflow,
    ),
    Section(
        name="ablation",
        title="Ablation",
        words="Parts taken away: the host tier, write-through, copies beside work, mixed passes, the "
        "admission gate (which then promises five times what the engine has), and what readers report. "
        "`adaptive` in overload, where all parts have work to do; `tokenflow` below capacity, because in "
        "overload it goes back to stock's order.",
        cases=_ablation,
    ),
    Section(
        name="load",
        title="Load",
        words="From half of what the engine can give to half more than that.",
        cases=_load,
    ),
    Section(
        name="traces",
        title="Traces on other machines",
        words="BurstGPT-like arrivals and the Azure conversation trace on an A6000 and an H200.",
        cases=_traces,
    ),
    Section(
        name="readers",
        title="Readers who pause, scan, pay more, or are machines",
        words="-reports: the engine is told nothing of pauses and scanning.",
        cases=_readers,
    ),
    Section(
        name="limits",
        title="Where it cannot help",
        words="No queue (load 0.3); far overload (3); readers faster than the engine (100 tokens a second); "
        "machines only.",
        cases=_limits,
    ),
    Section(
        name="timelines",
        title="One burst, token by token",
        words="4090-a at load 0.8, first seed.",
        cases=_timelines,
    ),
)
