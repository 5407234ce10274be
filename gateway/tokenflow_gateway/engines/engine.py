"""One engine as the gateway knows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tokenflow_engine.protocol import EngineStats, GatewayMessage, Welcome
from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines.breaker import Breaker
from tokenflow_gateway.engines.load import EngineLoad

__all__ = ["NOT_CONNECTED", "Engine"]

NOT_CONNECTED = "not connected yet"


def _nobody(_message: GatewayMessage) -> bool:
    return False


@dataclass(slots=True, eq=False)
class Engine:
    """Configuration, health and the latest statistics of one engine. Written by its probe and its link."""

    config: EngineConfig
    name: str = field(init=False)
    healthy: bool = False
    health_reason: str | None = "not probed yet"
    kind: Literal["sglang", "openai"] = "openai"
    """SGLang takes the gateway's `rid` and can be told to abort; others get plain OpenAI requests."""
    models: tuple[dict[str, object], ...] = ()
    """Entries of its ``/v1/models``."""
    welcome: Welcome | None = None
    """Set while the link to its plugin is up."""
    link_reason: str | None = NOT_CONNECTED
    link_dropped: int = 0
    """Messages not sent because the engine's plugin did not read."""
    tell: Callable[[GatewayMessage], bool] = _nobody
    """Sends its plugin a message; False if there is no link to send it over."""
    stats: EngineStats | None = None
    streams: set[str] = field(default_factory=set)
    """`rid` of the streams placed here."""
    answered: set[str] = field(default_factory=set)
    """Those of them whose answer is here in full: the engine is done, their clients are not."""
    followed: int = 0
    """Responses that it goes on with by itself, and is asked for now and then."""
    load: EngineLoad = field(default_factory=EngineLoad)
    breaker: Breaker = field(default_factory=Breaker)
    draining: bool = False
    """It gets no new requests; those that it has go on."""
    _ids: tuple[tuple[dict[str, object], ...], frozenset[str]] = field(default=((), frozenset()), init=False)
    """`models`, and their ids: every request asks for these."""

    def __post_init__(self) -> None:
        self.name = self.config.name

    @property
    def at_work(self) -> int:
        """How many of `streams` it still works on."""
        return len(self.streams) - len(self.answered)

    @property
    def linked(self) -> bool:
        return self.welcome is not None

    @property
    def model_ids(self) -> frozenset[str]:
        if self._ids[0] is not self.models:
            self._ids = self.models, frozenset(str(model.get("id")) for model in self.models)
        return self._ids[1]

    def view(self) -> dict[str, object]:
        """The engine as ``/admin/engines`` shows it. What is not known is null, never zero."""
        stats = self.stats if self.linked else None
        return {
            "id": self.name,
            "url": self.config.url,
            "healthy": self.healthy,
            "linked": self.linked,
            "draining": self.draining,
            "breaker": self.breaker.state(time.monotonic()),
            "reason": self._reason(),
            "models": sorted(self.model_ids),
            "engine": self.welcome.engine if self.welcome else None,
            "running": stats and stats.running,
            "waiting": stats and stats.waiting,
            "parked": stats and stats.parked,
            "offloaded": stats and stats.offloaded,
            "policy": stats and stats.policy,
            "policies": self.welcome.policies if self.welcome else None,
            "fixed": next(iter(stats.fixed), None) if stats else None,
            "preemptions": stats and stats.preemptions,
            "kv_used_tokens": stats and stats.kv_used_tokens,
            "kv_tokens": stats and stats.kv_tokens,
            "tokens_per_s": stats and round(stats.tokens_per_s, 1),
            "hook_errors": stats and stats.hook_errors,
            "ranks_lost": stats and bool(stats.ranks_lost),
            "streams": len(self.streams),
        }

    def _reason(self) -> str | None:
        if not self.healthy:
            return self.health_reason
        if self.draining:
            return "draining"
        return None if self.linked else self.link_reason
