"""From a result's document to tables: medians, ranges, and ratios to the stock policy of the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenflow_bench.burst.deployment import STOCK
from tokenflow_bench.spread import Spread
from tokenflow_bench.tables import Table, number, spread

__all__ = ["page", "ratio", "table_of", "terminal"]

_Document = Mapping[str, Any]
_Run = Mapping[str, Any]

_INTRODUCTION = """# Readers on sockets, policies in turns

Written by `make bench-burst`; do not edit. The real engine, `tokenflow serve` in front of it, and simulated
people who read at their own pace.

- {at}, commit {commit}, `{command}`, seed {seed}
- {cpu}, {cores} cores, {memory} GiB, Linux {kernel}, load before the run {load:.2f}
- {versions}

How to read it:
- All readers of a table come at once. Load is the sum of their rates over the tokens per second that the
  stock engine makes with its memory full, measured just before.
- `fcfs` is stock SGLang scheduling: the plugin is there and leaves it alone. What is not among the flags
  below is SGLang's default, but for what its CPU path needs (`--device cpu`, `--attention-backend
  torch_native`, `--sleep-on-idle`). Every round runs each case on the same readers and texts, beginning with
  another one each time.
- Figures are medians over {runs} rounds with their range, then the median of the ratios to `fcfs` within a
  round. With fewer than a hundred readers, p99 is the slowest one.
- Latency counts from the scheduled arrival. *Wait* is TTFT plus the seconds in which a reader had nothing
  to read after the first token. A stream is *stall-free* with at most 0.2 s of these, and *good* with its
  first token within {target:g} s too. Streams that fail or do not end count as waiting until the horizon.
- *Effective* throughput and QoS are the paper's: a token counts in full while less than 10 % of its answer
  lies unread, not at all from 20 % on. They reward slowness, so look at raw throughput beside them. *Read*
  counts what people had read within a fixed time, the same for all cases. QoE is that of Andes,
  which knows no pauses.
- Rates are lognormal around the one given, and declared to the gateway, which gets no reports unless the
  table says so. The people are simulated; their lengths and pauses are drawn, not recorded.
"""
_TABLE = """
## {words}, {title}

{readers} readers at {rate:g} tokens per second (median), answers of {output} tokens (mean); capacity
{capacity:.0f} tokens per second; memory for {fit:.0f} % of the whole streams.

Engine: `{flags}`; {cores}.{caution}

{table}
"""
_CAUTION = "\n\n**{count} of {runs} runs are not to be used: {objection}.**"


@dataclass(frozen=True, slots=True)
class _Line:
    """One figure: where it is in a run, how it is shown, and whether a ratio to stock says something."""

    words: str
    value: Callable[[_Run], float | None]
    digits: int = 2
    scale: float = 1.0
    has_ratio: bool = True


def _figure(words: str, name: str, digits: int = 2, *, scale: float = 1.0, has_ratio: bool = True) -> _Line:
    return _Line(words, lambda run: run["figures"][name], digits, scale, has_ratio)


def _after_pause(words: str, name: str, digits: int = 2) -> _Line:
    return _Line(words, lambda run: (run["figures"]["after_pause"] or {}).get(name), digits, has_ratio=False)


def _driver(words: str, name: str, digits: int, *, scale: float = 1.0) -> _Line:
    return _Line(words, lambda run: run["driver"][name], digits, scale, has_ratio=False)


def _engine(words: str, parts: Sequence[str], digits: int = 0, *, scale: float = 1.0) -> _Line:
    """A counter of the engine, by parts of its exported name; the sum of all that match."""

    def value(run: _Run) -> float | None:
        found = [count for name, count in run["engine"].items() if all(part in name for part in parts)]
        return sum(found) if found else None

    return _Line(words, value, digits, scale, has_ratio=False)


_LINES = (
    _figure("TTFT, mean, s", "ttft_mean_s"),
    _figure("TTFT, p50, s", "ttft_p50_s"),
    _figure("TTFT, p99, s", "ttft_p99_s"),
    _figure("wait, mean, s", "wait_mean_s"),
    _figure("wait, p99, s", "wait_p99_s"),
    _figure("stall-free, %", "stall_free_share", 0, scale=100, has_ratio=False),
    _figure("good, %", "good_share", 0, scale=100, has_ratio=False),
    _figure("raw, tokens/s", "raw_tokens_per_s", 0),
    _figure("read, tokens/s", "consumed_tokens_per_s", 0),
    _figure("effective, tokens/s", "effective_tokens_per_s", 0),
    _figure("QoS, tokens/s", "qos", 0, has_ratio=False),
    _figure("QoE, mean", "qoe_mean", 3, has_ratio=False),
    _figure("text ready, mean, s", "lead_mean_s"),
    _figure("time until all is generated, s", "makespan_s", 1),
    _figure("answers that were not whole", "missing", 0, has_ratio=False),
)
_PAUSE_LINES = (
    _after_pause("after the pause: text to read, mean, s", "text_mean_s"),
    _after_pause("text to read, p99, s", "text_p99_s"),
    _after_pause("new token, mean, s", "new_token_mean_s"),
    _after_pause("answers that were all there by then", "over_by_then", 0),
    _after_pause("stalls over 0.3 s, in all", "stalls", 0),
)


def _plan_ms(run: _Run) -> float | None:
    plans = run["engine"].get("tokenflow_engine_plans")
    return 1000 * run["engine"]["tokenflow_engine_plan_s"] / plans if plans else None


_ENGINE_LINES = (
    _engine("retracted by SGLang, computed again", ("retracted",)),
    _engine("parked, KV kept", ("preemptions", "{parked}")),
    _engine("moved to host memory", ("preemptions", "{offloaded}")),
    _engine("dropped, computed again", ("preemptions", "{dropped}")),
    _engine("preempted for want of memory", ("preemptions", "{memory}")),
    _engine("written to host memory, MB", ("written", "bytes"), 1, scale=1e-6),
    _engine("loaded from it, MB", ("loaded", "bytes"), 1, scale=1e-6),
    _Line("a plan, mean, ms", _plan_ms, has_ratio=False),
    _engine("errors of the plugin", ("errors",)),
)


_DRIVER_LINES = (
    _driver("driver: lag, p99, ms", "lag_p99_ms", 1),
    _driver("driver: CPU, % of a core", "cpu_share", 0, scale=100),
)


def terminal(document: _Document) -> str:
    """All tables."""
    parts = []
    for table in document["tables"]:
        head = f"{table['words']}, {table['title']}: {table['readers']} readers"
        parts.append(f"{head}\n{table_of(table).text()}{_caution(table)}")
    return "\n\n".join(parts)


def page(document: _Document) -> str:
    """The page in Markdown."""
    machine, versions = document["machine"], document["versions"]
    left_out = ("commit", "openai", "aiohttp")
    head = _INTRODUCTION.format(
        at=document["at"],
        commit=versions["commit"],
        command=document["command"],
        seed=document["seed"],
        cpu=machine["cpu"],
        cores=machine["cores"],
        memory=machine["memory_gib"],
        kernel=machine["kernel"],
        load=machine["load_before"],
        versions=", ".join(f"{name} {value}" for name, value in versions.items() if name not in left_out),
        runs=document["runs"],
        target=document["target_s"],
    )
    return head + "".join(_section(table) for table in document["tables"])


def _section(table: _Document) -> str:
    values = {
        name: table[name] for name in ("words", "title", "readers", "rate", "output", "capacity", "cores")
    }
    return _TABLE.format(
        **values,
        fit=100 * table["fit"],
        flags=" ".join(table["flags"]),
        caution=_caution(table),
        table=table_of(table).markdown(),
    )


def table_of(table: _Document) -> Table:
    """A column for each case; lines about which no run says anything are left out."""
    cases: Mapping[str, Sequence[_Run]] = table["cases"]
    lines = [*_LINES, *_PAUSE_LINES, *_ENGINE_LINES, *_DRIVER_LINES]
    said = [line for line in lines if any(line.value(run) is not None for run in _all(cases))]
    rows = [[line.words, *(_cell(line, name, cases) for name in cases)] for line in said]
    return Table(["", *cases], rows)


def ratio(runs: Iterable[float | None], stock: Iterable[float | None]) -> float | None:
    """The median over the rounds of what one case has for each unit of stock; None where stock has none."""
    pairs = zip(runs, stock, strict=True)
    return Spread.of(one / other if one is not None and other else None for one, other in pairs).median


def _cell(line: _Line, name: str, cases: Mapping[str, Sequence[_Run]]) -> str:
    values = [line.value(run) for run in cases[name]]
    words = spread(Spread.of(None if value is None else line.scale * value for value in values), line.digits)
    if not line.has_ratio or name == STOCK or STOCK not in cases:
        return words
    against = ratio(values, [line.value(run) for run in cases[STOCK]])
    return words if against is None else f"{words}, x{number(against, 2)}"


def _caution(table: _Document) -> str:
    runs = list(_all(table["cases"]))
    objections = [run["objection"] for run in runs if run["objection"]]
    if not objections:
        return ""
    return _CAUTION.format(count=len(objections), runs=len(runs), objection=objections[0])


def _all(cases: Mapping[str, Sequence[_Run]]) -> Iterable[_Run]:
    return (run for runs in cases.values() for run in runs)
