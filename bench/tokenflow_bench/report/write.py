"""Files of a report: `docs/results.md` with its pictures, and the page with everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenflow_bench.report.drawing import Plot
from tokenflow_bench.report.goals import goals_summary, goals_table, goals_words
from tokenflow_bench.report.groups import command_of, sections_of
from tokenflow_bench.report.page import head_line, html_page
from tokenflow_bench.report.plots import plots_of
from tokenflow_bench.report.sections import short_table
from tokenflow_bench.report.worse import WHY_WORSE, WORSE, worse_table

__all__ = ["TITLE", "write_plots", "write_report"]

TITLE = "Results in simulation"
_ONLY_DRAWN = ("timelines",)
_INTRO = """\
Policies on simulated engines: discrete events, pass by pass, with the very policy objects that ship in the
plugin. **No figure on this page was measured on a GPU.** Machines are cost models
(`bench/tokenflow_bench/machines.toml`, with sources): the RTX 4090's is a fit to measured profiles, the
A6000's one with fewer points, the H200's an estimate. `tokenflow sim --list` shows them and the set-ups.
Readers who pause or scan are synthetic: no public data on pauses was found.

`stock` is SGLang 0.5.23 with its default flags, `stock+mixed` with `--enable-mixed-chunk`, which all other
policies have as well. `andes-offload` is Andes as in its paper: preempted streams are computed again; `andes`
is the same policy with our KV tier. `tokenflow` is the paper's scheduler, `adaptive` ours. `bound` is the
fluid limit (`bound.py`). *Wait* is TTFT + stall: how late the last token is read. *Stall-free*: the share of
streams with at most 0.2 s of stall in all. *Effective* throughput is the paper's, uncapped, and pays for
slowness: look at *raw* beside it. Medians over seeds, and in brackets the range.
"""


def write_report(document: Mapping[str, Any], *, page: Path, html: Path) -> Iterator[Path]:
    """Write all of it; the paths, as they are written. Pictures go to `img` beside `page`."""
    plots = plots_of(document)
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(html_page(document, plots, title=TITLE))
    yield html
    yield from write_plots(plots, page.parent / "img")
    page.write_text(_markdown(document, plots))
    yield page


def write_plots(plots: Sequence[Plot], folder: Path) -> Iterator[Path]:
    """One PNG each."""
    folder.mkdir(parents=True, exist_ok=True)
    for plot in plots:
        path = folder / f"{plot.name}.png"
        path.write_bytes(plot.png)
        yield path


def _markdown(document: Mapping[str, Any], plots: Sequence[Plot]) -> str:
    parts = [f"# {TITLE}", _INTRO, f"{head_line(document)}. `make paper` writes this page."]
    for section in sections_of(document):
        if section["name"] in _ONLY_DRAWN:
            continue
        parts += [f"## {section['title']}", section["words"]]
        if section["name"] == "goals":
            parts += [
                goals_summary(document),
                goals_table(document).markdown(),
                *_listed("Why, where a goal is missed", goals_words(document)),
            ]
        else:
            parts.append(short_table(document, section).markdown())
        parts.append(f"`{command_of(document, section)}`")
        if section["name"] == "goals":
            parts += ["## Where it is worse", WORSE, worse_table(document).markdown()]
            parts += _listed("Why, as far as it is known", WHY_WORSE)
    parts.append("## Pictures")
    for plot in plots:
        parts += [f"### {plot.title}", f"![{plot.title}](img/{plot.name}.png)", plot.words]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _listed(head: str, lines: Sequence[str]) -> list[str]:
    return [f"{head}:\n\n" + "\n".join(f"- {line}" for line in lines)] if lines else []
