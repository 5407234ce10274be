"""Which engine gets a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final

from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.engines.placement import Placement, Wish
from tokenflow_gateway.relay.errors import ModelNotFound, NoEngine

__all__ = ["ANY", "EngineRegistry"]

ANY: Final = Wish()
"""Nothing in particular."""


class EngineRegistry:
    """All configured engines, and the choice among them."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        placement: Placement | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = tuple(engines)
        self.placement = placement or Placement()
        self._clock = clock

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, name: str) -> Engine | None:
        """The engine of this name."""
        return next((engine for engine in self._engines if engine.name == name), None)

    def ready(self) -> list[Engine]:
        return [engine for engine in self._engines if engine.healthy]

    def pick(
        self,
        model: str | None,
        *,
        without: Set[Engine] = frozenset(),
        among: Set[str] | None = None,
        wish: Wish = ANY,
        streams: bool = True,
    ) -> Engine:
        """The engine for a request that is not to wait for one; see `serving` and `Placement`.

        `streams`: it is followed as a stream, and takes the place of one.
        """
        now = self._clock()
        engine = self.placement.least_loaded(self.serving(model, without=without, among=among), wish, now)
        if streams:
            self.sent_to(engine)
        else:
            engine.breaker.sent(now)
        return engine

    def sent_to(self, engine: Engine) -> None:
        """A stream goes there."""
        now = self._clock()
        engine.load.sent(now)
        engine.breaker.sent(now)

    def serving(
        self, model: str | None, *, without: Set[Engine] = frozenset(), among: Set[str] | None = None
    ) -> list[Engine]:
        """The engines that may be asked for `model` now, but for those `without`: at least one.

        `among`: names of the engines that may be chosen; None for all. A fleet of one model takes any name:
        the engine itself decides whether it minds (SGLang does not). Where all of them fail, they are asked
        all the same. Raises `ModelNotFound` or `NoEngine`.
        """
        usable = self._engines if among is None else [e for e in self._engines if e.name in among]
        healthy = [engine for engine in usable if engine.healthy]
        serving = [engine for engine in healthy if model is None or model in engine.model_ids]
        if not serving and healthy:
            serving = _without_exact_match(model, usable, healthy)
        serving = [engine for engine in serving if not (engine.draining or engine in without)]
        if not serving:
            raise NoEngine(self._why_none())
        now = self._clock()
        return [engine for engine in serving if engine.breaker.allows(now)] or serving

    def known(self, model: str | None) -> str | None:
        """`model`, if an engine has it; None for all other names, which clients make up."""
        for engine in self._engines:
            if model in engine.model_ids:
                return model
        return None

    def models(self, *, among: Set[str] | None = None) -> list[dict[str, object]]:
        """The models of all healthy engines, each once; of those named in `among`, where it is given."""
        found: dict[str, dict[str, object]] = {}
        for engine in self.ready():
            if among is not None and engine.name not in among:
                continue
            for model in engine.models:
                found.setdefault(str(model.get("id")), model)
        return list(found.values())

    def _why_none(self) -> str:
        """In words for a client, who must not learn of our addresses; the log has them."""
        reasons = {engine.health_reason or "unknown" for engine in self._engines if not engine.healthy}
        reasons |= {"draining" for engine in self._engines if engine.healthy and engine.draining}
        return f"no engine can take this request now ({', '.join(sorted(reasons))})"


def _without_exact_match(model: str | None, usable: Sequence[Engine], healthy: list[Engine]) -> list[Engine]:
    """Who is asked for a model that no healthy engine has. Engines beyond the `usable` ones do not exist."""
    known = {name for engine in usable for name in engine.model_ids}
    if model in known:
        return []  # its engines are configured, and down
    if len(known) <= 1:
        return healthy
    raise ModelNotFound(
        f"no engine serves the model {model!r}; available: {', '.join(sorted(known))}", param="model"
    )
