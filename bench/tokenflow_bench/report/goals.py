"""The goals as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenflow_bench.tables import Table

__all__ = ["goals_summary", "goals_table"]

_MARKS = {(True, True): "", (True, False): " (honest)", (False, False): " MISSED", (False, True): " MISSED"}


def goals_table(document: Mapping[str, Any]) -> Table:
    """A row for each goal on each of its set-ups; a cell without a mark meets the ambitious figure, too."""
    rows = []
    for one in document["goals"]:
        cells = [
            words + _MARKS[honest, ambitious]
            for words, honest, ambitious in zip(one["shown"], one["honest"], one["ambitious"], strict=True)
        ]
        load = "20 tok/s" if one["load"] is None else f"{one['load']:g}"
        rows.append(
            [
                one["goal"],
                f"{one['setup']}, {load}",
                "; ".join(cells),
                _met(all(one["honest"])),
                _met(all(one["ambitious"])),
            ]
        )
    return Table(("goal", "set-up, load", "adaptive", "honest", "ambitious"), rows)


def goals_summary(document: Mapping[str, Any]) -> str:
    """How many of the goals are met on all of their set-ups."""
    titles = list(dict.fromkeys(one["goal"] for one in document["goals"]))

    def met(kind: str) -> int:
        return sum(
            all(all(one[kind]) for one in document["goals"] if one["goal"] == title) for title in titles
        )

    return (
        f"Of {len(titles)} goals, {met('honest')} are met on all of their set-ups, "
        f"{met('ambitious')} of them with the ambitious figures, too."
    )


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"
