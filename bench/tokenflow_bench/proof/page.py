"""The experiment's page, and the simulator held against it: in Markdown, and as one page of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tokenflow_bench.burst.report import page as burst_page
from tokenflow_bench.burst.report import table_of
from tokenflow_bench.burst.targets import judged, worth
from tokenflow_bench.costs import Machine
from tokenflow_bench.report.drawing import Plot
from tokenflow_bench.report.html import html_document, html_figure, html_table
from tokenflow_bench.simulator.validate import Comparison, comparison_table, in_short
from tokenflow_bench.tables import Table

__all__ = ["html", "machine_table", "page"]

_TITLE = "Stock scheduling and ours on the real engine"
_PICTURE = "### {title}\n\n![{title}](img/{name}.png)\n\n{words}\n"
_VALIDATION = """
## The simulator against these runs

The requests of each run above, with the lengths that the engine counted, went through `tokenflow sim`'s
engine under the same policy. What its passes cost was fitted (as by `tokenflow calibrate`) to short runs of
other requests on a second engine like it, before and after each round: no machine is always equally fast.

{machines}

{words}.

{table}

*In range*: no further off than the rounds of the real engine are from each other. Preemptions are streams
taken out of the batch, retractions by SGLang included. With so few readers one of them more or less admitted
moves a p99 by seconds, and how many of a burst stock scheduling admits at first depends on milliseconds:
those who have arrived when the first prompt is computed, then nobody until a stream ends. Not simulated: the
plugin's own work beside passes (plans, copies, reports), sampling, tokenizing, and the few pages at the
beginning of a chat prompt that all of them share.
"""


def page(
    document: Mapping[str, Any],
    machines: Sequence[Machine],
    comparisons: Sequence[Comparison],
    plots: Sequence[Plot],
) -> str:
    """In Markdown, with pictures in `img`."""
    text = burst_page(document) + _VALIDATION.format(
        machines=machine_table(machines).markdown(),
        words=in_short(comparisons),
        table=comparison_table(comparisons).markdown(),
    )
    pictures = [_PICTURE.format(title=plot.title, name=plot.name, words=plot.words) for plot in plots]
    return "\n".join([text, "## Pictures\n", *pictures])


def html(
    document: Mapping[str, Any],
    machines: Sequence[Machine],
    comparisons: Sequence[Comparison],
    plots: Sequence[Plot],
) -> str:
    """With everything in it."""
    machine, versions = document["machine"], document["versions"]
    made = (
        f"Made {document['at']} on {machine['cpu']}, {machine['cores']} cores; "
        f"{', '.join(f'{name} {value}' for name, value in versions.items())}; seed {document['seed']}; "
        f"{document['command']}"
    )
    parts = [f"<h1>{_TITLE}</h1>", f'<p class="made">{escape(made)}</p>', *map(html_figure, plots)]
    for table in document["tables"]:
        parts.append(f"<h2>{escape(table['words'])}, {escape(table['title'])}</h2>")
        verdicts = [*judged(table), *worth(table)]
        parts += [html_table(table_of(table)), *(f"<p>{escape(str(line))}</p>" for line in verdicts)]
    parts += ["<h2>The simulator against these runs</h2>", html_table(machine_table(machines))]
    parts += [f"<p>{escape(in_short(comparisons))}</p>", html_table(comparison_table(comparisons))]
    return html_document(_TITLE, parts, document)


def machine_table(machines: Sequence[Machine]) -> Table:
    """What passes cost, in milliseconds."""
    head = ("", "decode step", "a stream", "1,000 tokens of context", "prefill", "100 tokens of it", "fit")
    return Table(
        head,
        [
            (
                machine.name,
                *(
                    f"{1000 * seconds:.2f} ms"
                    for seconds in (
                        machine.step_base_s,
                        machine.step_per_stream_s,
                        1000 * machine.step_per_context_token_s,
                        machine.prefill_base_s,
                        100 * machine.prefill_per_token_s,
                    )
                ),
                machine.quality,
            )
            for machine in machines
        ],
    )
