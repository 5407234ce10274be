"""docs/results-proof.md: the experiment's page, and the simulator held against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenflow_bench.burst.report import page as burst_page
from tokenflow_bench.costs import Machine
from tokenflow_bench.simulator.validate import Comparison, comparison_table, in_short
from tokenflow_bench.tables import Table

__all__ = ["machine_table", "page"]

_VALIDATION = """
## The simulator against these runs

The requests of each run above (but for those with pauses), with the lengths that the engine counted, went
through `tokenflow sim`'s engine under the same policy, on the machine that `tokenflow calibrate` fitted just
before:

{machines}

{words}.

{table}

Preemptions are streams taken out of the batch, retractions by SGLang included. With so few readers one of
them more or less admitted moves a p99 by seconds. Not simulated: the time that plans take, sampling,
tokenizing, that SGLang's overlap schedule sends tokens a pass late, and the few pages at the beginning of a
chat prompt that all of them share.
"""


def page(
    document: Mapping[str, Any], machines: Mapping[str, Machine], comparisons: Sequence[Comparison]
) -> str:
    """In Markdown."""
    return burst_page(document) + _VALIDATION.format(
        machines=machine_table(machines).markdown(),
        words=in_short(comparisons),
        table=comparison_table(comparisons).markdown(),
    )


def machine_table(machines: Mapping[str, Machine]) -> Table:
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
            for machine in machines.values()
        ],
    )
