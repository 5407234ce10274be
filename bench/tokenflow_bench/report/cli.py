"""`tokenflow report`: a result's JSON as one page of HTML and PNG plots."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tokenflow_bench.report.page import html_page
from tokenflow_bench.report.plots import plots_of
from tokenflow_bench.report.write import TITLE, write_plots, write_report

__all__ = ["report"]

_KINDS = ("simulation", "paper")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="By default RESULT with .html.")
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Write PNGs there, too.")
@click.option(
    "--page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the short page (Markdown) there, its pictures to img beside it, as `make paper` does.",
)
def report(*, result: Path, out: Path | None, plots: Path | None, page: Path | None) -> None:
    """Draw what `tokenflow sim --out` or `make paper` has written.

    \b
    Examples:
      tokenflow sim --setup 4090-a --load 0.8 --timeline --out burst.json
      tokenflow report burst.json
    """  # noqa: D301  # \b keeps click from filling a paragraph
    try:
        document = json.loads(result.read_text())
    except ValueError as error:
        raise click.ClickException(f"{result} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("kind") not in _KINDS:
        raise click.ClickException(f"{result} is no result of `tokenflow sim --out` or `make paper`")
    html = out or result.with_suffix(".html")
    if page is not None:
        written = list(write_report(document, page=page, html=html))
    else:
        drawn = plots_of(document)
        html.write_text(html_page(document, drawn, title=TITLE))
        written = [html, *(write_plots(drawn, plots) if plots else ())]
    for path in written:
        click.echo(f"wrote {path}")
