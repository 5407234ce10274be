"""Which engine gets a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.relay.errors import ModelNotFound, NoEngine

__all__ = ["EngineRegistry"]


class EngineRegistry:
    """All configured engines, and the choice among them."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def ready(self) -> list[Engine]:
        return [engine for engine in self._engines if engine.healthy]

    def pick(self, model: str | None) -> Engine:
        """The healthy engine that serves `model` and has the fewest streams.

        A fleet of one model takes any name: the engine itself decides whether it minds (SGLang does not).
        Raises `ModelNotFound` or `NoEngine`.
        """
        healthy = self.ready()
        serving = [engine for engine in healthy if model in engine.model_ids]
        if not serving and healthy:
            serving = self._without_exact_match(model, healthy)
        if not serving:
            raise NoEngine(self._why_none())
        return min(serving, key=lambda engine: len(engine.streams))

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
        reasons = "; ".join(f"{e.name}: {e.health_reason}" for e in self._engines if not e.healthy)
        return f"no engine can take this request now ({reasons})" if reasons else "no engine is available"
