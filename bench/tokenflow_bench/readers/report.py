"""From a result's document to what people read: tables in the terminal, a page in the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenflow_bench.readers.accuracy.verdict import RowSummary, verdict
from tokenflow_bench.readers.paused.plan import LOOKS_PER_S
from tokenflow_bench.spread import Spread
from tokenflow_bench.tables import Table, spread

__all__ = ["LATER_MS", "accuracy_table", "page", "paused_table", "terminal"]

LATER_MS = 5.0
"""Readers who go on may have their tokens so much later because others have stopped."""
_MOST_WAITING = 0.05
_Document = Mapping[str, Any]

_INTRODUCTION = """# What the gateway knows of its readers, measured

Written by `make bench-readers`; do not edit. Repetitions: {repetitions}. Figures are medians, with the range.

- {at}, commit {commit}, `{command}`, seed {seed}
- {cpu}, {cores} cores, {memory} GiB, Linux {kernel}, load before the run {load:.2f}
- {versions}
"""
_ACCURACY = """
## Readers whose position is known

A replayed engine says recorded events of the real one ({bytes:.0f} bytes on average) at {rate:.0f} tokens
per second to `tokenflow serve`. Readers take 10 tokens per second, or what their row says: {before:.0f} s, a
pause of {pause:.0f} s in rows with one, then {after:.0f} s. `/admin/streams` is asked 20 times a second, and
`buffered` compared with what the engine had said and the reader had read in the middle of that request.

- A token is read when it is taken from the socket; with the Python client when its loop asks for the next
  one; on a page when it is on the screen, which is by whole words. Where a client takes all at once, a
  person is simulated behind it.
- Notice times are to the first sample that shows it, so up to 50 ms too long. "3x not": in so many
  repetitions the pause went unnoticed. Made up: share of samples with a pause while the reader read.
- Hidden: the most that lay unread in the client's own kernel (`FIONREAD`). No gateway can see it; the target
  of such a row is that no error is larger, and that it is no more than the receive buffer.
- Rows behind nginx have `proxy_buffering off`. Two pages at a time share the browser.

{table}
"""
_PAUSED = """
## {streams} streams, {pausing} of them paused

The gateway has core {gateway_cpus} for itself, engine and clients share {other_cpus}. Every stream has
{rate:.0f} tokens per second and is looked at for {window:.0f} s. {stopped} clients stop reading their sockets
(`SO_RCVBUF` 4096), {reported} read on and report a pause. Times between tokens are those of the {others} who
never pause, at their sockets. The memory of a stopped stream follows from the mean of all.
The gateway looks at each connection {looks:.0f} times a second; what that costs is the difference to one that
does not. On a quiet machine the gateway hardly ever waits for its core; where it does, times between tokens
say more of the machine than of the gateway.

{table}
"""


def terminal(document: _Document) -> str:
    """The tables there are."""
    parts = []
    if "accuracy" in document:
        parts.append(accuracy_table(document["accuracy"]).text())
        parts.extend(_left_out(document["accuracy"]))
    if "paused" in document:
        parts.append(paused_table(document["paused"]).text())
        parts.extend(_busy(document["paused"]))
    return "\n\n".join(parts)


def page(document: _Document) -> str:
    """The page in Markdown."""
    parts = [_introduction(document)]
    if "accuracy" in document:
        parts.append(_accuracy(document["accuracy"]))
        parts.extend(f"\n**{warning}**\n" for warning in _left_out(document["accuracy"]))
    if "paused" in document:
        parts.append(_paused(document["paused"]))
        parts.extend(f"\n**{warning}**\n" for warning in _busy(document["paused"]))
    return "".join(parts)


def accuracy_table(accuracy: _Document) -> Table:
    """A line for each reader."""
    head = [
        "reader",
        "evidence",
        "mean error, tokens",
        "p95",
        "% of read",
        "pause noticed, ms",
        "its end, ms",
        "made up, %",
        "hidden, kB",
        "target",
        "",
    ]
    return Table(head, [_accuracy_line(RowSummary.of(row)) for row in accuracy["rows"]])


def _accuracy_line(row: RowSummary) -> list[str]:
    return [
        row.words,
        row.source,
        spread(row.mean_error, 2),
        spread(row.p95_error, 1),
        spread(_times(row.share, 100), 1),
        _noticed(row, row.pause_noticed_ms),
        _noticed(row, row.resume_noticed_ms),
        spread(_times(row.false_pauses, 100), 1),
        spread(_times(row.hidden_bytes, 1e-3), 0) if row.hidden_bytes.median else "-",
        row.target.words,
        verdict(row),
    ]


def _noticed(row: RowSummary, figure: Spread) -> str:
    if not row.pauses:
        return "-"
    return "not" if figure.median is None else spread(figure)


def paused_table(paused: _Document) -> Table:
    """A line for each figure, without and with readers who have paused."""
    runs: Sequence[_Document] = paused["repetitions"]

    def of(*keys: str, scale: float = 1.0) -> Spread:
        return Spread.of(_dig(run, keys, scale) for run in runs)

    def both(words: str, *keys: str, digits: int = 0, scale: float = 1.0) -> list[str]:
        cells = [spread(of(case, *keys, scale=scale), digits) for case in ("all_read", "some_paused")]
        return [words, *cells, "-", "-"]

    def later(words: str, key: str) -> list[str]:
        figure = of("compared", key)
        met = figure.median is not None and abs(figure.median) <= LATER_MS
        return [words, "-", spread(figure, 2), f"within {LATER_MS:.0f} ms", "met" if met else "missed"]

    stopped = spread(of("compared", "kib_per_stopped"), 1)
    report, look = spread(of("all_read", "report_us")), spread(of("compared", "look_us"), 1)
    return Table(
        ["", "all read", f"{paused['stopped'] + paused['reported']} paused", "target", ""],
        [
            both("gateway's memory (RSS) for an open stream, KiB", "kib_per_stream", digits=1),
            ["the same for one whose client has stopped reading, KiB", "-", stopped, "-", "-"],
            both("tokens it shows as unread for such a one", "unread_tokens_per_stopped"),
            both("gateway's memory without streams, MiB", "idle_mib"),
            both("time between tokens, p50, ms", "gaps", "p50_ms", digits=1),
            both("time between tokens, p99, ms", "gaps", "p99_ms", digits=1),
            later("p50 later than where all read, ms", "p50_later_ms"),
            later("p99 later than where all read, ms", "p99_later_ms"),
            both("tokens received by clients, per second", "tokens_per_s"),
            both("CPU of the gateway, % of a core", "cpu_share", "gateway", scale=100),
            both("the gateway waited for its core, % of the time", "waited_share", digits=1, scale=100),
            both("CPU of the engine, % of a core", "cpu_share", "engine", scale=100),
            both("CPU of the clients, % of a core", "cpu_share", "clients", scale=100),
            ["CPU of the gateway for a progress report, us", report, "-", "-", "-"],
            ["CPU of the gateway for a look at a connection, us", look, "-", "-", "-"],
        ],
    )


def _accuracy(accuracy: _Document) -> str:
    plan = accuracy["plan"]
    return _ACCURACY.format(
        bytes=accuracy["bytes_per_event"],
        rate=accuracy["engine_tokens_per_s"],
        before=plan["before_s"],
        pause=plan["pause_s"],
        after=plan["after_s"],
        table=accuracy_table(accuracy).markdown(),
    )


def _paused(paused: _Document) -> str:
    pausing = paused["stopped"] + paused["reported"]
    return _PAUSED.format(
        streams=f"{paused['streams']:,}",
        pausing=pausing,
        others=paused["streams"] - pausing,
        stopped=paused["stopped"],
        reported=paused["reported"],
        gateway_cpus=_words(paused["gateway_cpus"]),
        other_cpus=_words(paused["other_cpus"]),
        rate=paused["engine_tokens_per_s"],
        window=paused["window_s"],
        looks=LOOKS_PER_S,
        table=paused_table(paused).markdown(),
    )


def _left_out(accuracy: _Document) -> list[str]:
    return [f"LEFT OUT: the rows with {name}, which is not installed here." for name in accuracy["left_out"]]


def _busy(paused: _Document) -> list[str]:
    """A warning where somebody else had the gateway's core."""
    cases = ("all_read", "some_paused", "unwatched")
    most = max(run[case]["waited_share"] for run in paused["repetitions"] for case in cases)
    if most <= _MOST_WAITING:
        return []
    return [f"THE MACHINE WAS BUSY: the gateway waited {most:.0%} of the time for its core. Do it again."]


def _introduction(document: _Document) -> str:
    machine, versions = document["machine"], document["versions"]
    repetitions = [len(row["repetitions"]) for row in document.get("accuracy", {}).get("rows", [])]
    repetitions += [len(document["paused"]["repetitions"])] if "paused" in document else []
    return _INTRODUCTION.format(
        repetitions=_words(sorted(set(repetitions))),
        at=document["at"],
        commit=versions["commit"],
        command=document["command"],
        seed=document["seed"],
        cpu=machine["cpu"],
        cores=machine["cores"],
        memory=machine["memory_gib"],
        kernel=machine["kernel"],
        load=machine["load_before"],
        versions=", ".join(f"{name} {value}" for name, value in versions.items() if name != "commit"),
    )


def _dig(run: _Document, keys: Iterable[str], scale: float) -> float | None:
    value: Any = run
    for key in keys:
        value = value[key]
    return None if value is None else scale * value


def _times(figure: Spread, factor: float) -> Spread:
    if figure.median is None or figure.low is None or figure.high is None:
        return figure
    return Spread(figure.median * factor, figure.low * factor, figure.high * factor, figure.missing)


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
