"""One page of HTML with everything in it: tables, pictures, and the data as JSON."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tokenflow_bench.report.goals import goals_summary, goals_table
from tokenflow_bench.report.groups import command_of, sections_of
from tokenflow_bench.report.plots import Plot
from tokenflow_bench.report.sections import whole_table
from tokenflow_bench.tables import Table

__all__ = ["html_page"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color:
#1c1c1c } h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem } .wide { overflow-x: auto } table {
border-collapse: collapse; font-size: 12px; white-space: nowrap } th, td { border-bottom: 1px solid #ddd;
padding: .2rem .6rem; text-align: right } th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {
text-align: left } figure { margin: 1.5rem 0 } img { max-width: 100% } figcaption, .made { color: #666;
font-size: 12px } code { background: #f3f3f3; padding: 0 .2rem }
"""


def html_page(document: Mapping[str, Any], plots: Sequence[Plot], *, title: str) -> str:
    """Needs nothing from outside. The data lies in `<script id="data" type="application/json">`."""
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="made">{escape(head_line(document))}</p>']
    for section in sections_of(document):
        parts += [f"<h2>{escape(section['title'])}</h2>", f"<p>{escape(section['words'])}</p>"]
        if section["name"] == "goals":
            parts += [f"<p>{escape(goals_summary(document))}</p>", _table(goals_table(document))]
        parts.append(_table(whole_table(document, section)))
        parts.append(f'<p class="made">Medians over seeds (range). {_words(_made(document, section))}</p>')
    parts.append("<h2>Pictures</h2>")
    parts += [_figure(plot) for plot in plots]
    data = json.dumps(document).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n"
        + "\n".join(parts)
        + f'\n<script id="data" type="application/json">{data}</script>\n'
    )


def head_line(document: Mapping[str, Any]) -> str:
    """Where, when and with what it was made."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items())
    return (
        f"Made {document['at']} on {machine['cpu']}, {machine['cores']} cores; {versions}; "
        f"seeds {', '.join(map(str, document['seeds']))}; {document['command']}"
    )


def _made(document: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    return f"`{command_of(document, section)}`"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _figure(plot: Plot) -> str:
    image = b64encode(plot.png).decode()
    return (
        f'<figure id="{plot.name}"><h3>{escape(plot.title)}</h3>'
        f'<img alt="{escape(plot.title)}" src="data:image/png;base64,{image}">'
        f"<figcaption>{_words(plot.words)}</figcaption></figure>"
    )


def _words(text: str) -> str:
    """Between backticks: code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))
