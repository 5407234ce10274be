"""Rows of a view in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tokenflow_engine.policy.base import Bools, Floats, Ints

__all__ = ["ascending", "heaviest_first", "lowest", "lowest_first", "paged"]

_FEW = 32


def paged(tokens: int, page_tokens: int) -> int:
    """`tokens`, rounded up to whole pages."""
    return -(-tokens // page_tokens) * page_tokens


def lowest(keys: Floats, rows: Ints, count: int) -> Ints:
    """The `count` of `rows` with the lowest `keys`, lowest first, ties in row order."""
    if len(rows) < 2:
        return rows[:count]
    ordered = keys.take(rows)
    if bool((ordered[1:] >= ordered[:-1]).all()):
        return rows[:count]  # as newcomers of one class are, by their arrival
    if len(rows) > count:
        near = np.flatnonzero(ordered <= np.partition(ordered, count - 1)[count - 1])
        rows, ordered = rows.take(near), ordered.take(near)
    return rows[ordered.argsort(kind="stable")[:count]]


def ascending(keys: Floats, rows: Ints) -> Iterator[int]:
    """All of `rows`, lowest `keys` first, ties in row order; for who mostly needs only the first few."""
    yield from lowest(keys, rows, _FEW).tolist()
    if len(rows) > _FEW:
        yield from lowest(keys, rows, len(rows))[_FEW:].tolist()


def lowest_first(keys: Floats) -> Callable[[Bools], Iterator[int]]:
    """What puts some rows `ascending`."""
    return lambda rows: ascending(keys, np.flatnonzero(rows))


def heaviest_first(urgency: Floats, weight: Floats, rows: Ints, most: int) -> Ints:
    """At most `most` of `rows`, all of a heavier class before any of a lighter one, the most urgent first.

    Else many of a light class who have waited for minutes would be all that is looked at.
    """
    first = rows[:0]
    while len(first) < most and len(rows):
        weights = weight.take(rows)
        heaviest = weights.max()
        if weights.min() == heaviest:
            last = lowest(urgency, rows, most - len(first))
            return np.concatenate([first, last]) if len(first) else last
        lighter = weights < heaviest
        first = np.concatenate([first, lowest(urgency, rows[~lighter], most - len(first))])
        rows = rows[lighter]
    return first
