"""What ships: one currency (slack), decisions on events, and no promise that the engine cannot keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from tokenflow_engine.policy.base import EngineView, Plan
from tokenflow_engine.policy.crowd import Crowd
from tokenflow_engine.policy.leisure import stock_plan
from tokenflow_engine.policy.options import Options
from tokenflow_engine.policy.planning import Planning

__all__ = ["Adaptive"]


class Adaptive:
    """Stateless: hysteresis comes from the view's `since`, so equal views give equal plans.

    Nobody starves, however much memory it takes. A started stream whose reader is dry is brought back at
    once where a stream far enough ahead or free room is found. After `hold_s` outside, what is free is kept
    for it, so that small ones do not take it for ever. After `starving_s` it takes a place from any stream
    but those that came in as late and have not had their `stay_s`: it waits at most `starving_s + stay_s *
    (number of starving ones before it)` beyond the time the engine needs to bring it back, if all that run
    may be parked; those that may not have to end first. A newcomer waits until the demand of those before it
    in its own and heavier classes has gone down, and one who reads faster than a full batch writes lets
    others go first for `yields_s`; once it is `hold_s` late, what those inside leave is kept for it. With no
    reader's stream inside it always gets in. For a lead of others it waits until it is `hold_s` late, at
    most; and while loads of its class, or a heavier one, are late on a busy link, until it is `starving_s`
    late. A machine waits as long as a started stream, and `patience_s`.
    """

    name = "adaptive"

    def __init__(self, **options: float) -> None:
        unknown = options.keys() - {option.name for option in fields(Options)}
        if unknown:
            raise ValueError(f"unknown options of policy adaptive: {', '.join(sorted(unknown))}")
        self._options = Options(**options)  # type: ignore[arg-type]

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        """See `Policy.plan`."""
        options = self._options
        stock = stock_plan(view, options)
        if stock is not None:
            return stock
        crowd = Crowd.of(view, most=options.most, patience_s=options.patience_s)
        if crowd is None:
            return Planning(view, options).plan()
        return Planning(crowd.rest(), options, crowd=crowd).plan().of_whole(crowd.kept)
