"""A plan as the ranks of one engine receive it: the same for all, streams by the engine's request ids."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenflow_engine.control.parts import ALL_PARTS, Parts
from tokenflow_engine.policy.base import Place, Plan

__all__ = ["STOCK", "Orders"]


class Orders(msgspec.Struct, kw_only=True, frozen=True, array_like=True):
    """See `Plan`, whose rows have become rids. Orders stand until the next ones come."""

    stock: bool = False
    park: list[str] = []
    evict: list[str] = []
    resume: list[str] = []
    load: list[tuple[str, int]] = []
    """With the value of the `Place`."""
    admit: list[str] = []
    prefill_tokens: int | None = None
    write: list[str] = []
    due_s: dict[str, float] = {}
    parts: Parts = ALL_PARTS

    @classmethod
    def of(cls, plan: Plan, ids: Sequence[str]) -> Orders:
        """The orders of a plan for a view whose rows are called `ids`."""
        return cls(
            stock=plan.stock,
            park=[ids[row] for row in plan.park],
            evict=[ids[row] for row in plan.evict],
            resume=[ids[row] for row in plan.resume],
            load=[(ids[row], int(Place(place))) for row, place in plan.load],
            admit=[ids[row] for row in plan.admit],
            prefill_tokens=plan.prefill_tokens,
            write=[ids[row] for row in plan.write],
            due_s={ids[row]: seconds for row, seconds in plan.due_s.items()},
        )


STOCK = Orders(stock=True)
"""Everybody back into the engine's own hands."""
