"""Who asks, what they may, and what one request is granted: the types that the rest of `tenants/` speaks.

`Tenant` and `SlaClass` are configured, a `Principal` comes of a request's key, and a `Grant` of the
principal's rights and the request's wishes. All are immutable: a request keeps its grant, whatever is
configured meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, Literal

import msgspec

from tokenflow_engine.protocol import Reader

__all__ = [
    "ANONYMOUS",
    "DEFAULT_CLASS",
    "UNLIMITED",
    "BudgetPeriod",
    "Grant",
    "KeyKind",
    "Limits",
    "Principal",
    "SlaClass",
    "Tenant",
]

ANONYMOUS: Final = "anonymous"
"""The tenant of requests without a key, where these are allowed."""

DEFAULT_CLASS: Final = "default"
"""The class that exists without being configured."""

BudgetPeriod = Literal["day", "month"]
KeyKind = Literal["client", "admin", "monitor"]
"""``client``: may generate; ``admin``: admin views and routes; ``monitor``: metrics only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a tenant, or one key of it, may use. None is no limit. Tokens are prompt and output together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_streams: int | None = None
    budget_tokens: int | None = None
    """In each `budget_period`, which begins at midnight UTC (of the first of the month)."""
    budget_period: BudgetPeriod = "month"

    def over(self, wider: Limits) -> Limits:
        """`wider`, with what is limited here in its place."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.budget_tokens is None:
            del given["budget_period"]
        return replace(wider, **{name: value for name, value in given.items() if value is not None})

    @property
    def is_unlimited(self) -> bool:
        limits = (
            self.requests_per_minute,
            self.tokens_per_minute,
            self.concurrent_streams,
            self.budget_tokens,
        )
        return limits == (None, None, None, None)


UNLIMITED: Final = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaClass:
    """What is promised to the streams of one class, and what they may ask for."""

    name: str
    weight: float = 1.0
    """Who goes first when not everybody can be served: more before less."""
    max_weight: float = 1.0
    """The most that a request of this class may raise its own to; at least `weight`."""
    ttft_s: float = 1.0
    """Seconds to the first token. A request may ask for more time, not for less."""
    rate_floor: float | None = None
    """Tokens per second that its readers are taken to read at least, until they are known better."""
    max_rate: float | None = None
    """Tokens per second that a request may declare at most."""
    may_park: bool = True
    """Whether its streams may be taken out of the batch while their readers have enough."""
    lead_cap_s: float | None = None
    """Seconds of reading that a stream may be ahead of its reader, where engines support a cap."""
    share_floor: float = 0.0
    """Of the places in the queue before the engines, the share that is this class's in any case."""
    engine_priority: int | None = None
    """Body `priority` for the engine. None: the field is not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A configured tenant, or one that only its keys name."""

    name: str
    classes: tuple[str, ...] = (DEFAULT_CLASS,)
    """Those it may use."""
    default_class: str = DEFAULT_CLASS
    limits: Limits = UNLIMITED
    """Of all its keys together."""
    engines: frozenset[str] | None = None
    """Names of the engines that serve it; None for all."""
    weight: float = 1.0
    """Its share among the tenants of a class, where these wait for their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who sent a request, with the key's own restrictions applied to the tenant's rights."""

    tenant: Tenant
    """Its name, and the rights of the tenant without those of the key."""
    key_id: str | None = None
    """The key's public part; None for requests without one."""
    classes: tuple[str, ...] = (DEFAULT_CLASS,)
    default_class: str = DEFAULT_CLASS
    limits: Limits = UNLIMITED
    """What this key may use: the tenant's limits hold for all of its keys together, beside these."""
    engines: frozenset[str] | None = None
    key_origin: str | None = None
    """The first of the keys that this one replaces, one after the other, where it does."""

    @property
    def name(self) -> str:
        """The tenant's."""
        return self.tenant.name


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What one request gets: never more than its principal's rights."""

    principal: Principal
    sla: SlaClass
    reader: Reader = "human"
    declared_rate: float | None = None
    """Tokens per second."""
    weight: float = 1.0
    ttft_s: float = 1.0
    may_park: bool = True
    fairness_id: str | None = None
    """Whom of the tenant's users the request is for; fairness within the tenant, nothing beyond it."""
    reduced: tuple[str, ...] = ()
    """What was asked for and not granted in full: ``sla``, ``ttft``, ``rate``, ``priority``."""

    @property
    def tenant(self) -> str:
        return self.principal.tenant.name

    @property
    def key_id(self) -> str | None:
        return self.principal.key_id

    @property
    def engine_priority(self) -> int | None:
        return self.sla.engine_priority

    @property
    def engines(self) -> frozenset[str] | None:
        return self.principal.engines
