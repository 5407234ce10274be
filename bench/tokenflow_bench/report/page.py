"""One page of HTML with everything in it: tables, pictures, and the data as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tokenflow_bench.report.drawing import Plot
from tokenflow_bench.report.goals import goals_summary, goals_table, goals_words
from tokenflow_bench.report.groups import command_of, sections_of
from tokenflow_bench.report.html import html_document, html_figure, html_table, html_words
from tokenflow_bench.report.sections import whole_table
from tokenflow_bench.report.worse import WHY_WORSE, WORSE, worse_table

__all__ = ["head_line", "html_page"]


def html_page(document: Mapping[str, Any], plots: Sequence[Plot], *, title: str) -> str:
    """Needs nothing from outside. The data lies in `<script id="data" type="application/json">`."""
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="made">{escape(head_line(document))}</p>']
    for section in sections_of(document):
        parts += [f"<h2>{escape(section['title'])}</h2>", f"<p>{html_words(section['words'])}</p>"]
        if section["name"] == "goals":
            parts += [f"<p>{escape(goals_summary(document))}</p>", html_table(goals_table(document))]
            parts += [f"<p>{escape(line)}</p>" for line in goals_words(document)]
            parts += ["<h2>Where it is worse</h2>", f"<p>{html_words(WORSE)}</p>"]
            parts += [html_table(worse_table(document)), *(f"<p>{html_words(why)}</p>" for why in WHY_WORSE)]
        parts.append(html_table(whole_table(document, section)))
        made = html_words(f"`{command_of(document, section)}`")
        parts.append(f'<p class="made">Medians over seeds (range). {made}</p>')
    parts.append("<h2>Pictures</h2>")
    parts += [html_figure(plot) for plot in plots]
    return html_document(title, parts, document)


def head_line(document: Mapping[str, Any]) -> str:
    """Where, when and with what it was made."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items())
    took = f": {document['took']}" if "took" in document else ""
    again = ""
    if "judged_by" in document:
        again = f"; goals and words of {document['judged_at']}, commit {document['judged_by']}"
    return (
        f"Made {document['at']} on {machine['cpu']}, {machine['cores']} cores; {versions}; "
        f"seeds {', '.join(map(str, document['seeds']))}; {document['command']}{took}{again}"
    )
