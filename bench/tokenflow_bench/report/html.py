"""Pieces of a page that needs nothing from outside: the data lies in `<script id="data">` as JSON."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tokenflow_bench.report.drawing import Plot
from tokenflow_bench.tables import Table

__all__ = ["html_document", "html_figure", "html_table", "html_words"]

_LONG = 60
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; color:
#1c1c1c } h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem } .wide { overflow-x: auto } table {
border-collapse: collapse; font-size: 12px; white-space: nowrap } th, td { border-bottom: 1px solid #ddd;
padding: .2rem .6rem; text-align: right } th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {
text-align: left } figure { margin: 1.5rem 0 } img { max-width: 100% } figcaption, .made { color: #666;
font-size: 12px } td.words { text-align: left; white-space: normal; min-width: 24rem } code { background:
#f3f3f3; padding: 0 .2rem }
"""


def html_document(title: str, parts: Sequence[str], data: Mapping[str, Any]) -> str:
    """The whole page."""
    shown = json.dumps(data).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n"
        + "\n".join(parts)
        + f'\n<script id="data" type="application/json">{shown}</script>\n'
    )


def html_table(table: Table) -> str:
    """Long cells in lines; what is too wide can be scrolled."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(text: str) -> str:
    kind = ' class="words"' if len(text) > _LONG else ""
    return f"<td{kind}>{escape(text)}</td>"


def html_figure(plot: Plot) -> str:
    image = b64encode(plot.png).decode()
    return (
        f'<figure id="{plot.name}"><h3>{escape(plot.title)}</h3>'
        f'<img alt="{escape(plot.title)}" src="data:image/png;base64,{image}">'
        f"<figcaption>{html_words(plot.words)}</figcaption></figure>"
    )


def html_words(text: str) -> str:
    """Between backticks: code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))
