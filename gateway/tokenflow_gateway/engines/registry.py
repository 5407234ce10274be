"""Which engine gets a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set

from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.relay.errors import ModelNotFound, NoEngine

__all__ = ["EngineRegistry"]


class EngineRegistry:
    """All configured engines, and the choice among them."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self._turn = itertools.count()

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def ready(self) -> list[Engine]:
        return [engine for engine in self._engines if engine.healthy]

    def pick(self, model: str | None, *, without: Set[Engine] = frozenset()) -> Engine:
        """The healthy engine that serves `model` and has the fewest streams, but for those `without`.

        A fleet of one model takes any name: the engine itself decides whether it minds (SGLang does not).
        Raises `ModelNotFound` or `NoEngine`.
        """
        healthy = self.ready()
        serving = [engine for engine in healthy if model is None or model in engine.model_ids]
        if not serving and healthy:
            serving = self._without_exact_match(model, healthy)
        serving = [engine for engine in serving if engine not in without]
        if not serving:
            raise NoEngine(self._why_none())
        first = next(self._turn) % len(serving)  # equals take turns
        return min([*serving[first:], *serving[:first]], key=lambda engine: len(engine.streams))

    def models(self) -> list[dict[str, object]]:
        """The models of all healthy engines, each once."""
        found: dict[str, dict[str, object]] = {}
        for engine in self.ready():
            for model in engine.models:
                found.setdefault(str(model.get("id")), model)
        return list(found.values())

    def _without_exact_match(self, model: str | None, healthy: list[Engine]) -> list[Engine]:
        known = {name for engine in self._engines for name in engine.model_ids}
        if model in known:
            return []  # its engines are configured, and down
        if len(known) <= 1:
            return healthy
        raise ModelNotFound(
            f"no engine serves the model {model!r}; available: {', '.join(sorted(known))}", param="model"
        )

    def _why_none(self) -> str:
        """In words for a client, who must not learn of our addresses; the log has them."""
        reasons = {engine.health_reason or "unknown" for engine in self._engines if not engine.healthy}
        return f"no engine can take this request now ({', '.join(sorted(reasons))})"
