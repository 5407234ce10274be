"""What all plots share: size, style, colours, and how they become PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

__all__ = ["STYLE", "Plot", "as_plot", "colour_of", "grid"]

_COLOURS = {
    "stock": "#8a8a8a",
    "fcfs": "#8a8a8a",
    "stock+mixed": "#bdbdbd",
    "andes-offload": "#f2b379",
    "andes": "#e07b00",
    "tokenflow": "#7a4fbf",
    "adaptive": "#00806a",
    "bound": "#222222",
}
STYLE: Mapping[str, Any] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.dpi": 110.0,
    "svg.hashsalt": "tokenflow",
}
"""For `matplotlib.style.context`."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture. `name` is its file's, `words` say what is seen, of which seeds and by which command."""

    name: str
    title: str
    words: str
    png: bytes


def colour_of(policy: str) -> str:
    """The same for all variants of a policy."""
    return _COLOURS.get(policy) or next(
        (colour for name, colour in reversed(_COLOURS.items()) if policy.startswith(name)), "#444444"
    )


def grid(rows: int, columns: int) -> tuple[Figure, Any]:
    """A figure, and its axes as a two-dimensional array; those of a single row share both axes."""
    width = 6.0 if columns == 1 else 2.6 * columns + 0.6
    figure = Figure(figsize=(width, 3.2 if rows == 1 else 2.2 * rows), layout="constrained")
    shared = rows == 1
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared)


def as_plot(figure: Figure, name: str, title: str, words: str) -> Plot:
    """The same figure gives the same bytes."""
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    return Plot(name, title, words, png.getvalue())
