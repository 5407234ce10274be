"""From a result's document to tables: medians, ranges, and ratios to the stock policy of the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenflow_bench.burst import idle
from tokenflow_bench.burst.deployment import STOCK
from tokenflow_bench.burst.scenarios import PAUSE_AFTER_S, PAUSE_S
from tokenflow_bench.burst.targets import MET, OURS, judged, ratio, worth
from tokenflow_bench.spread import Spread
from tokenflow_bench.tables import Table, number, spread

__all__ = ["page", "table_of", "terminal"]

_Document = Mapping[str, Any]
_Run = Mapping[str, Any]

_INTRODUCTION = """# Readers on sockets, policies in turns

Written by the commands below; do not edit. The real engine, `tokenflow serve` in front of it, and simulated
people who read at their own pace.

{runs}
{machines}
"""
_HOW_TO_READ = """
How to read it:
- All readers come at once. Load is the sum of their rates over the tokens per second that the stock engine
  makes with its memory full. That is measured before each round, and gives its number of readers.
- `fcfs` is stock SGLang scheduling: the plugin is there and leaves it alone. What is not among the flags
  below is SGLang's default, but for what its CPU path needs (`--device cpu`, `--attention-backend
  torch_native`, `--sleep-on-idle`). Every round runs each case on the same readers and texts, beginning with
  another one each time.
- Figures are medians over the rounds with their range, then the median of the ratios to `fcfs` within a
  round. The readers of round n, from 0, are drawn with the seed above plus n. With fewer than a hundred
  readers, p99 is the slowest one.
- Latency counts from the scheduled arrival. *Wait* is TTFT plus the seconds in which a reader had nothing
  to read after the first token. A stream is *stall-free* with at most 0.2 s of these, and *good* with its
  first token within {target:g} s too. Streams that fail or do not end count as waiting until the horizon.
- *Effective* throughput and QoS are the paper's: a token counts in full while less than 10 % of its answer
  lies unread, not at all from 20 % on. They reward slowness, so look at raw throughput beside them, and at
  effective throughput *with leads capped*. *Read* counts what people had read within a fixed time, the same
  for all cases. QoE is that of Andes, which knows no pauses.
- Where readers pause, every second one does, from {pause_after:g} s after its first token on, for
  {pause:g} s. The KV of a stream counts as off the device if the gateway's view of streams, looked at
  twice a second, says so at any time in the pause. *Next token read* includes the reading of that token.
- What the engine did is by its own count. *Back* is from the decision to bring a stream back to its first
  pass in the batch.
- *Targets* are those the policy was written for: medians over the rounds, the limit beside them. With parts
  taken away, the ratios are those to the whole policy in the same round, median and range. A part *pays* if
  without it waits are 5 % longer, throughput is 5 % lower, or 5 % more of the streams stall, in the median
  over the rounds, and if so many rounds agree as chance would have agree once in ten times at most (all of
  five, seven of eight). It *costs* if that is so the other way round. Of anything else one *cannot tell*.
- Rates are lognormal around the one given, and declared to the gateway, which gets no reports unless the
  table says so. The people are simulated; their lengths and pauses are drawn, not recorded.
"""
_TABLE = """
## {words}, {title}

{readers} readers at {rate:g} tokens per second (median), answers of {output} tokens (mean); capacity
{capacity} tokens per second; memory for {fit} % of the whole streams{rounds}.

Engine: `{flags}`; {cores}.{caution}

{table}

What the engine did, and the driver:

{engine}
{verdicts}"""
_IDLE = """
## What the plugin costs where nothing is to be scheduled

Two engines are up at a time and take turns of a few seconds, pair by pair, on the same texts. Streams come
one after another, memory has room for all of them, all answers are equally long, and each is read half as
fast as the engine writes. Figures are the second one's over the first one's of the same pair: the median, and
where it lies with 95 % confidence. Throughput counts from a fifth of a turn's tokens to four fifths. *TTFT
alone*: with one stream at a time, each on one engine and then on the other, and the medians in milliseconds.
*A core, idle*: what each burns while nothing is asked of it, before the first pair and after the last one.
Wanted: with the plugin throughput and TTFT within 1 % of the stock engine's, with write-through at most 2 %
less throughput. Where what is in brackets is wider than that, these pairs do not show whether it is so.

Engine: {cores}.

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
    return _Line(words, lambda run: run["figures"].get(name), digits, scale, has_ratio)


def _after_pause(words: str, name: str, digits: int = 2, *, scale: float = 1.0) -> _Line:
    def value(run: _Run) -> float | None:
        return (run["figures"]["after_pause"] or {}).get(name)

    return _Line(words, value, digits, scale, has_ratio=False)


def _pausing(words: str, name: str, digits: int) -> _Line:
    return _Line(words, lambda run: (run.get("pausing") or {}).get(name), digits, has_ratio=False)


def _others(words: str, name: str, digits: int = 2, *, scale: float = 1.0, has_ratio: bool = True) -> _Line:
    def value(run: _Run) -> float | None:
        return ((run.get("pausing") or {}).get("others") or {}).get(name)

    return _Line(words, value, digits, scale, has_ratio)


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
    _figure("effective with leads capped, tokens/s", "effective_capped_tokens_per_s", 0),
    _figure("QoS, tokens/s", "qos", 0, has_ratio=False),
    _figure("QoE, mean", "qoe_mean", 3, has_ratio=False),
    _figure("text ready, mean, s", "lead_mean_s"),
    _figure("time until all is generated, s", "makespan_s", 1),
    _figure("answers that were not whole", "missing", 0, has_ratio=False),
)
_PAUSE_LINES = (
    _others("not pausing: TTFT, mean, s", "ttft_mean_s"),
    _others("not pausing: TTFT, p99, s", "ttft_p99_s"),
    _others("not pausing: wait, mean, s", "wait_mean_s"),
    _others("not pausing: stall-free, %", "stall_free_share", 0, scale=100, has_ratio=False),
    _after_pause("pauses", "pauses", 0),
    _pausing("pauses that began before the answer was over", "generating", 0),
    _pausing("in which the KV left the device", "moved_out", 0),
    _after_pause("pauses that ended before the answer was over", "is_generating", 0),
    _after_pause("pause to next token read, p50, s", "next_read_p50_s"),
    _after_pause("pause to next token read, p99, s", "next_read_p99_s"),
    _after_pause("pause to next token read, at most 1 s, %", "reads_on_share", 0, scale=100),
    _after_pause("longest stall within 10 s of the pause, p50, s", "longest_stall_p50_s"),
    _after_pause("longest stall within 10 s of the pause, p99, s", "longest_stall_p99_s"),
    _after_pause("longest stall within 10 s of the pause, at most 0.3 s, %", "smooth_share", 0, scale=100),
)


def _share_synced(run: _Run) -> float | None:
    evicted = run["engine"].get("tokenflow_engine_evicted_tokens")
    return run["engine"]["tokenflow_engine_evicted_synced_tokens"] / evicted if evicted else None


def _share_free(passes: Sequence[str]) -> Callable[[_Run], float | None]:
    """Of streams that host memory had when they were to leave, whose memory was free so soon."""

    def value(run: _Run) -> float | None:
        name = "tokenflow_engine_synced_evictions"
        counts = {key: count for key, count in run["engine"].items() if key.startswith(name)}
        total = sum(counts.values())
        return sum(counts.get(f"{name}{{{after}}}", 0.0) for after in passes) / total if total else None

    return value


def _return_s(kind: str) -> Callable[[_Run], float | None]:
    """Mean of that way back."""

    def value(run: _Run) -> float | None:
        count = run["engine"].get(f"tokenflow_engine_return_seconds_count{{{kind}}}")
        return run["engine"][f"tokenflow_engine_return_seconds_sum{{{kind}}}"] / count if count else None

    return value


def _slow_returns(run: _Run) -> float | None:
    """Returns of more than a second, of all kinds."""
    counts = {name: n for name, n in run["engine"].items() if name.startswith("tokenflow_engine_return_sec")}
    total = sum(n for name, n in counts.items() if "_count{" in name)
    within = sum(n for name, n in counts.items() if name.endswith(",1.0}"))
    return total - within if total else None


def _plan_ms(run: _Run) -> float | None:
    plans = run["engine"].get("tokenflow_engine_plans")
    return 1000 * run["engine"]["tokenflow_engine_plan_s"] / plans if plans else None


_ENGINE_LINES = (
    _engine("retracted by SGLang, computed again", ("retracted",)),
    _engine("preempted", ("preemptions", "{parked}")),
    _engine("of these, moved to host memory", ("preemptions", "{offloaded}")),
    _engine("of these, dropped and computed again", ("preemptions", "{dropped}")),
    _engine("preempted for want of memory", ("preemptions", "{memory}")),
    _engine("preempted again within a second", ("preemptions", "{thrashed}")),
    _Line("of what had to leave, in host memory already, %", _share_synced, 0, 100, has_ratio=False),
    _Line("whole there: free within a pass, %", _share_free(("0", "1")), 0, 100, has_ratio=False),
    _Line("whole there: free within two passes, %", _share_free(("0", "1", "2")), 0, 100, has_ratio=False),
    _engine("waiting for copies, s", ("copy_wait_s",), 1),
    _engine("written to host memory, MB", ("written", "bytes"), 1, scale=1e-6),
    _engine("loaded from it, MB", ("loaded", "bytes"), 1, scale=1e-6),
    _Line("back with KV on the device, mean, ms", _return_s("resumed"), 0, 1000, has_ratio=False),
    _Line("back from host memory, mean, ms", _return_s("loaded"), 0, 1000, has_ratio=False),
    _Line("back by a prefill, mean, ms", _return_s("recomputed"), 0, 1000, has_ratio=False),
    _Line("returns that took over a second", _slow_returns, 0, has_ratio=False),
    _engine("readers dry while preempted, as the engine sees it", ("stalls{",)),
    _engine("their waiting, s", ("stall_s{",), 1),
    _Line("a plan, mean, ms", _plan_ms, has_ratio=False),
    _engine("errors of the plugin", ("errors",)),
)


_DRIVER_LINES = (
    _driver("driver: lag, p99, ms", "lag_p99_ms", 1),
    _driver("driver: CPU, % of a core", "cpu_share", 0, scale=100),
)


_ALL_LINES = (*_LINES, *_PAUSE_LINES, *_ENGINE_LINES, *_DRIVER_LINES)


def terminal(*documents: _Document) -> str:
    """All tables."""
    bursts, pairs = _tables(documents)
    parts = []
    for table in bursts:
        head = f"{table['words']}, {table['title']}: {_rounds_of(table, 'readers')} readers"
        verdicts = "".join(f"\n{line}" for line in [*judged(table), *worth(table)])
        parts.append(f"{head}\n{table_of(table).text()}{_caution(table)}{verdicts}")
    return "\n\n".join([*parts, idle.table_of(pairs).text()] if pairs else parts)


def page(*documents: _Document) -> str:
    """The page in Markdown: policies in turns then what the plugin costs where nothing is scheduled."""
    bursts, pairs = _tables(documents)
    parts = [_introduction(documents)]
    if bursts:
        target_s = next(document["target_s"] for document in documents if "target_s" in document)
        parts.append(_HOW_TO_READ.format(target=target_s, pause_after=PAUSE_AFTER_S, pause=PAUSE_S))
        parts.append(_in_short(bursts))
        parts += map(_section, bursts)
    if pairs:
        cores = "; ".join(dict.fromkeys(table["cores"] for table in pairs))
        parts.append(_IDLE.format(cores=cores, table=idle.table_of(pairs).markdown()))
    return "".join(parts)


def _tables(documents: Sequence[_Document]) -> tuple[list[_Document], list[_Document]]:
    """Those of policies in turns, and those of engines in pairs (`idle`)."""
    tables = [table for document in documents for table in document["tables"]]
    return [table for table in tables if "cases" in table], [table for table in tables if "sides" in table]


def _introduction(documents: Sequence[_Document]) -> str:
    """How each result was made, and on what: once where that is the same."""
    runs = [
        f"- `{document['command']}`: {document['at']}, commit {document['versions']['commit']}, "
        f"seed {document['seed']}, load before the run {document['machine']['load_before']:.2f}"
        for document in documents
    ]
    return _INTRODUCTION.format(
        runs="\n".join(runs), machines="\n".join(dict.fromkeys(map(_made_on, documents)))
    )


def _made_on(document: _Document) -> str:
    machine, left_out = document["machine"], ("commit", "openai", "aiohttp")
    versions = (f"{name} {value}" for name, value in document["versions"].items() if name not in left_out)
    return (
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}\n- {', '.join(versions)}"
    )


def _in_short(tables: Sequence[_Document]) -> str:
    """Which targets were met in which table."""
    lines = []
    for table in tables:
        verdicts = judged(table)
        if verdicts:
            missed = [verdict for verdict in verdicts if not verdict.endswith(MET)]
            words = f"{len(verdicts) - len(missed)} of {len(verdicts)} targets met"
            details = f"; {'; '.join(missed)}" if missed else ""
            lines.append(f"- {table['setup']}, {table['title']}: {words}{details}")
    return "\n".join(["\n## In short, `adaptive` against stock\n", *lines, ""]) if lines else ""


def _section(table: _Document) -> str:
    values = {name: table[name] for name in ("words", "title", "rate", "output", "cores")}
    return _TABLE.format(
        **values,
        readers=_rounds_of(table, "readers"),
        capacity=_rounds_of(table, "capacity"),
        fit=_rounds_of(table, "fit", scale=100),
        rounds=f"; {table['rounds']} rounds" if "rounds" in table else "",
        flags=" ".join(table["flags"]),
        caution=_caution(table),
        table=table_of(table, (*_LINES, *_PAUSE_LINES)).markdown(),
        engine=table_of(table, (*_ENGINE_LINES, *_DRIVER_LINES)).markdown(),
        verdicts=_list("Targets", judged(table)) + _list(f"Without a part, against {OURS}", worth(table)),
    )


def _rounds_of(table: _Document, name: str, *, scale: float = 1.0) -> str:
    """One number a round; results were kept until November 2026 with one for all."""
    values = table[name] if isinstance(table[name], list) else [table[name]]
    return spread(Spread.of(scale * value for value in values), 0)


def _list(head: str, lines: Sequence[str]) -> str:
    return "\n".join([f"\n{head}:", "", *(f"- {line}" for line in lines), ""]) if lines else ""


def table_of(table: _Document, lines: Sequence[_Line] = _ALL_LINES) -> Table:
    """A column for each case; lines about which no run says anything are left out."""
    cases: Mapping[str, Sequence[_Run]] = table["cases"]
    said = [line for line in lines if any(line.value(run) is not None for run in _all(cases))]
    rows = [[line.words, *(_cell(line, name, cases) for name in cases)] for line in said]
    return Table(["", *cases], rows)


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
