"""The proof in pictures: what each case got, readers in time, and how far the simulator was off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.style import context

from tokenflow_bench.report.curves import TOKENS, UNREAD, draw_buffers, draw_tokens, draw_ttft
from tokenflow_bench.report.drawing import STYLE, Plot, as_plot, colour_of, grid
from tokenflow_bench.simulator.validate import TOLERANCE, Comparison
from tokenflow_bench.spread import Spread

__all__ = ["proof_plots"]

_FIGURES = {
    "ttft_p99_s": "TTFT P99, s",
    "wait_mean_s": "wait mean, s",
    "stall_free_share": "stall-free",
    "raw_tokens_per_s": "raw, tok/s",
}
_MARKS = "os^D"
_LINES = ("-", "--", "-.", ":")


def proof_plots(document: Mapping[str, Any], comparisons: Sequence[Comparison]) -> list[Plot]:
    """Bars of each set-up's tables, its readers in time; the simulator's ratios."""
    made = f"Seed {document['seed']}; `{document['command']}`."
    with context(dict(STYLE)):
        return [
            *_bars(document["tables"], made),
            *_readers(document["tables"], made),
            *_ratios(comparisons, made),
        ]


def _bars(tables: Sequence[Mapping[str, Any]], made: str) -> Iterator[Plot]:
    for setup in dict.fromkeys(table["setup"] for table in tables):
        mine = [table for table in tables if table["setup"] == setup]
        figure, axes = grid(max(len(mine), 2), len(_FIGURES))
        for row in axes[len(mine) :]:
            for axis in row:
                axis.remove()
        for table, row in zip(mine, axes, strict=False):
            for axis, (name, title) in zip(row, _FIGURES.items(), strict=True):
                _draw_cases(axis, table["cases"], name)
                axis.set_title(title, fontsize=8)
            row[0].set_ylabel(_broken(table["title"]), fontsize=8)
        words = f"Medians over the rounds, lines from the least to the most. {made}"
        yield as_plot(figure, f"proof-{setup}", f"Policies on the real engine: {mine[0]['words']}", words)


def _draw_cases(axis: Axes, cases: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> None:
    for place, (case, runs) in enumerate(cases.items()):
        found = Spread.of(run["figures"][name] for run in runs)
        if found.median is None or found.low is None or found.high is None:
            continue
        axis.bar(place, found.median, color=colour_of(case))
        axis.plot([place, place], [found.low, found.high], color="#222222", lw=1)
    axis.set_xticks(range(len(cases)), [_broken(case, 14) for case in cases], rotation=90, fontsize=7)


def _readers(tables: Sequence[Mapping[str, Any]], made: str) -> Iterator[Plot]:
    """In the first round of each table: tokens against the reading line, unread text, first tokens."""
    for table in tables:
        drawn = {name: runs[0]["timeline"] for name, runs in table["cases"].items() if "timeline" in runs[0]}
        if not drawn:
            continue
        figure, axes = grid(3, len(drawn))
        for column, (name, timeline) in enumerate(drawn.items()):
            draw_tokens(axes[0, column], timeline)
            draw_buffers(axes[1, column], timeline)
            axes[0, column].set_title(_broken(name), fontsize=8)
            axes[1, column].set_xlabel("s")
            draw_ttft(axes[2, 0], timeline, name)
            axes[2, 0].lines[-1].set_linestyle(_LINES[column % len(_LINES)])  # variants share a colour
            if column:
                axes[0, column].set_ylabel("")
                axes[1, column].set_ylabel("")
                axes[2, column].remove()
        for row in axes[:2]:
            _same_scale(row)
        axes[2, 0].legend(fontsize=7)
        title = f"Readers on the real engine: {table['words']}, {table['title']}"
        words = f"The first round. Above: {TOKENS} Middle: {UNREAD} Below: time to first token. {made}"
        yield as_plot(figure, f"proof-readers-{_file_name(table)}", title, words)


def _same_scale(row: Sequence[Axes]) -> None:
    """Panels of one row, so that they can be compared."""
    for axis in row:
        axis.set_xlim(0, max(other.get_xlim()[1] for other in row))
        axis.set_ylim(0, max(other.get_ylim()[1] for other in row))


def _file_name(table: Mapping[str, Any]) -> str:
    what = "pauses" if table["pausing"] else "parts" if "parts" in table["title"] else f"{table['load']:g}"
    return f"{table['setup']}-{what}"


def _broken(words: str, width: int = 22) -> str:
    """In lines of about `width`."""
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _ratios(comparisons: Sequence[Comparison], made: str) -> Iterator[Plot]:
    rows = list(dict.fromkeys((one.setup, one.title, one.case) for one in comparisons))
    if not rows:
        return
    figure, axes = grid(1, 1)
    figure.set_size_inches(7.0, 1.6 + 0.24 * len(rows))
    axis = axes[0][0]
    axis.axvspan(1 - TOLERANCE, 1 + TOLERANCE, color="#00806a", alpha=0.12, lw=0)
    for mark, name in zip(_MARKS, dict.fromkeys(one.figure for one in comparisons), strict=False):
        points = [one for one in comparisons if one.figure == name and one.ratio]
        places = [rows.index((one.setup, one.title, one.case)) for one in points]
        axis.plot([one.ratio for one in points], places, mark, ms=4, alpha=0.8, label=name)
    axis.set_yticks(range(len(rows)), [", ".join(row) for row in rows], fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel="simulated / real", xlim=(0, None))
    figure.legend(fontsize=7, loc="outside lower center", ncols=len(_MARKS))
    words = f"Medians; the band is {100 * TOLERANCE:.0f} %. Cases in which a figure is 0 have no mark. {made}"
    yield as_plot(figure, "proof-simulator", "The simulator against the real engine", words)
