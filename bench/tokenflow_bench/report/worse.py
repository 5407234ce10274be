"""Where ours is worse than stock: found in the figures, so that none is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenflow_bench.report.groups import Place, places_of, sections_of
from tokenflow_bench.tables import Table, number

__all__ = ["WHY_WORSE", "WORSE", "worse_table"]

_OURS, _STOCK = "adaptive", "stock"
_MARK = " WORSE"
WORSE = (
    "Every place on this page at which `adaptive` does worse than stock, whose figure is in brackets. WORSE: "
    "the median of the mean wait or of TTFT P99 is longer by a tenth and by half a second, raw throughput is "
    "lower by 3 %, or five more of a hundred streams stall."
)
WHY_WORSE = (
    "A machine too slow for its readers (A6000): with everybody in the batch a decode step takes longer than "
    "a token is read for, and most readers stall. `adaptive` keeps the batch smaller, so that who is in it "
    "reads on, and the others wait for their first word. Who wants everybody to begin at once is better off "
    "with stock.",
    "Far overload (load 3), and readers faster than the engine (100 tokens a second): nobody reads without "
    "stalls, whatever the policy. The paper's scheduler goes back to stock's order there and loses nothing; "
    "`adaptive` does not, and loses throughput.",
    "Readers who scan: what the engine is told of them buys fewer stalls with throughput and with the time "
    "of newcomers (compare `adaptive-reports`). Most of it goes into batches made smaller for a pace that "
    "lasts two seconds. `adaptive:tight_s=0` never does that, and waits x0.16 as long as stock, with x1.06 "
    "of its raw throughput (three seeds); but then steady readers nearly as fast as a full batch stall.",
    "Classes: the light ones wait for the heavy ones, and TTFT P99 is theirs.",
    "h200-gamma at load 1.5: memory is large for its link to the host. Streams that are due at one time wait "
    "for each other's loads, one in ten for longer than its lead lasts; the mean wait is half of stock's.",
)


@dataclass(frozen=True, slots=True)
class _Figure:
    title: str
    name: str
    digits: int
    share: float = 0.0
    """Worse by more than this share of stock's figure ..."""
    more: float = 0.0
    """... and by more than this."""
    is_least: bool = False
    """More of it is better."""

    def is_worse(self, ours: float, stock: float) -> bool:
        lost = stock - ours if self.is_least else ours - stock
        return lost > self.share * stock and lost > self.more


_FIGURES = (
    _Figure("wait mean, s", "wait_mean_s", 2, share=0.1, more=0.5),
    _Figure("TTFT P99, s", "ttft_p99_s", 2, share=0.1, more=0.5),
    _Figure("stall-free", "stall_free_share", 2, more=0.05, is_least=True),
    _Figure("raw, tok/s", "raw_tokens_per_s", 0, share=0.03, is_least=True),
)


def worse_table(document: Mapping[str, Any]) -> Table:
    """A row for each such place; empty without our policy and stock."""
    rows: dict[str, list[str]] = {}
    for section in sections_of(document):
        for place in places_of(document, section):
            if {_OURS, _STOCK} <= place.cases.keys():
                rows[place.name] = [place.name, *_cells(place)]
    worse = [row for row in rows.values() if any(cell.endswith(_MARK) for cell in row)]
    return Table(["", *(figure.title for figure in _FIGURES)], worse)


def _cells(place: Place) -> Iterator[str]:
    for figure in _FIGURES:
        ours, stock = (place.figure(policy, figure.name).median for policy in (_OURS, _STOCK))
        words = f"{number(ours, figure.digits)} ({number(stock, figure.digits)})"
        is_worse = ours is not None and stock is not None and figure.is_worse(ours, stock)
        yield f"{words}{_MARK}" if is_worse else words
