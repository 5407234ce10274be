"""The goals as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenflow_bench.tables import Table

__all__ = ["goals_summary", "goals_table", "goals_words"]


def goals_table(document: Mapping[str, Any]) -> Table:
    """A row for each goal on each of its set-ups; a cell without a mark meets the ambitious figure, too.

    Whether it is met by the medians, and in how many of the seeds.
    """
    seeds = len(document["seeds"])
    rows = []
    for one in document["goals"]:
        columns = (one[name] for name in ("shown", "honest", "ambitious", "limits", "in_reach"))
        cells = [_cell(*column) for column in zip(*columns, strict=True)]
        load = "20 tok/s" if one["load"] is None else f"{one['load']:g}"
        policy = "" if one["policy"] == "adaptive" else f", {one['policy']}"
        rows.append(
            [
                one["goal"],
                f"{one['setup']}, {load}{policy}",
                "; ".join(cells),
                _met(all(one["honest"]), one["honest_seeds"], seeds),
                _met(all(one["ambitious"]), one["ambitious_seeds"], seeds),
            ]
        )
    return Table(("goal", "set-up, load", "reached", "honest", "ambitious"), rows)


def goals_words(document: Mapping[str, Any]) -> list[str]:
    """Of each goal that is missed somewhere and of which it is known, why."""
    whys = {one["goal"]: one["why"] for one in document["goals"] if not all(one["honest"]) and one["why"]}
    return [f"{goal}: {why}" for goal, why in whys.items()]


def goals_summary(document: Mapping[str, Any]) -> str:
    """How many of the goals are met on all of their set-ups."""
    titles = list(dict.fromkeys(one["goal"] for one in document["goals"]))

    def met(kind: str) -> int:
        return sum(
            all(all(one[kind]) for one in document["goals"] if one["goal"] == title) for title in titles
        )

    rows = [all(one[kind]) for kind in ("honest", "ambitious") for one in document["goals"]]
    count = len(document["goals"])
    beyond = sum(not all(one["in_reach"]) for one in document["goals"])
    return (
        f"Of {len(titles)} goals, {met('honest')} are met on all of their set-ups, "
        f"{met('ambitious')} of them with the ambitious figures, too. Of their {count} rows, "
        f"{sum(rows[:count])} and {sum(rows[count:])}; {beyond} have a figure out of reach of any policy."
    )


def _cell(words: str, honest: bool, ambitious: bool, limit: str, in_reach: bool) -> str:
    if honest:
        return words if ambitious else f"{words} (honest)"
    if not in_reach:
        return f"{words} MISSED, out of reach (limit {limit})"
    return f"{words} MISSED" + (f" (limit {limit})" if limit else "")


def _met(is_met: bool, met_seeds: int, seeds: int) -> str:
    return f"{'met' if is_met else 'missed'} ({met_seeds}/{seeds})"
