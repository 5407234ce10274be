"""Tables for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenflow_bench.spread import Spread

__all__ = ["Table", "number", "spread"]


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Aligned columns."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        rule = ["-" * width for width in widths]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [self.head, rule, *self.rows]
        )

    def markdown(self) -> str:
        return "\n".join(
            "| " + " | ".join(line) + " |" for line in [self.head, ["---"] * len(self.head), *self.rows]
        )


def number(value: float | None, digits: int = 0) -> str:
    """As it is shown; a dash for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def spread(figure: Spread, digits: int = 0) -> str:
    """Median and range, and how many repetitions have none."""
    if figure.median is None:
        return "-"
    words = number(figure.median, digits)
    if figure.low != figure.high:
        words += f" ({number(figure.low, digits)} to {number(figure.high, digits)})"
    return words + (f", {figure.missing}x not" if figure.missing else "")
