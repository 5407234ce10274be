"""The part of the configuration that says who may do what: classes of service, tenants, whom to trust."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tokenflow_gateway.tenants.model import (
    ANONYMOUS,
    DEFAULT_CLASS,
    BudgetPeriod,
    Limits,
    SlaClass,
    Tenant,
)

__all__ = [
    "AnonymousMode",
    "ClassSettings",
    "LimitSettings",
    "Network",
    "PhaseTimes",
    "Seconds",
    "TenantSettings",
    "Timeouts",
    "UsageSettings",
    "check_names",
    "names_tenants",
]

AnonymousMode = Literal["auto", "allow", "deny"]
"""Requests without a key. ``auto``: allowed on loopback while there is neither a key nor a named tenant."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]
_Rate = Annotated[float, Field(ge=0.05, le=1000)]
_Weight = Annotated[float, Field(ge=0.001, le=1000)]
_Count = Annotated[int, Field(ge=1, le=10**15)]


class Timeouts(BaseModel):
    """How long each phase of a request may take, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_s: Seconds = 60.0
    """For the client to send its request."""
    connect_s: Seconds = 5.0
    """For a connection to the engine, its name looked up and TLS agreed on."""
    first_byte_s: Seconds = 600.0
    """For the first event of a stream, or the first byte of another answer: connection, queue and prefill."""
    idle_s: Seconds = 120.0
    """Between two events of a stream (comments are none), or two reads of another answer."""
    total_s: Seconds | None = None
    """From the request's arrival to the end of its answer, the client's own slowness included."""


class PhaseTimes(BaseModel):
    """Some of `Timeouts`, for some requests; what is not given stays as it is for all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_s: Seconds | None = None
    connect_s: Seconds | None = None
    first_byte_s: Seconds | None = None
    idle_s: Seconds | None = None
    total_s: Seconds | None = None

    def over(self, wider: Timeouts) -> Timeouts:
        """`wider`, with what is given here in its place."""
        return wider.model_copy(update=self.model_dump(exclude_none=True))


class ClassSettings(BaseModel):
    """One class of service; `SlaClass` says what each part does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: _Weight = 1.0
    max_weight: _Weight | None = None
    """By default `weight`: requests cannot raise their own."""
    ttft_ms: float = Field(default=1000.0, ge=1, le=3_600_000)
    rate_floor: _Rate | None = None
    max_rate: _Rate | None = None
    may_park: bool = True
    lead_cap_s: Seconds | None = None
    share_floor: float = Field(default=0.0, ge=0, le=1)
    engine_priority: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.max_weight is not None and self.max_weight < self.weight:
            raise ValueError("max_weight is below weight")
        if None not in (self.rate_floor, self.max_rate) and self.max_rate < self.rate_floor:  # type: ignore[operator]
            raise ValueError("max_rate is below rate_floor")
        return self

    def named(self, name: str) -> SlaClass:
        return SlaClass(
            name=name,
            weight=self.weight,
            max_weight=self.weight if self.max_weight is None else self.max_weight,
            ttft_s=self.ttft_ms / 1000,
            rate_floor=self.rate_floor,
            max_rate=self.max_rate,
            may_park=self.may_park,
            lead_cap_s=self.lead_cap_s,
            share_floor=self.share_floor,
            engine_priority=self.engine_priority,
        )


class LimitSettings(BaseModel):
    """What may be used; see `Limits`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrent_streams: _Count | None = None
    budget_tokens: _Count | None = None
    budget_period: BudgetPeriod = "month"

    def limits(self) -> Limits:
        return Limits(**self.model_dump())


class TenantSettings(BaseModel):
    """What one tenant may do, and what is different for its requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    classes: tuple[str, ...] = Field(default=(DEFAULT_CLASS,), min_length=1)
    """Classes that its requests may ask for."""
    default_class: str | None = None
    """Of requests that ask for none; by default the first of `classes`."""
    limits: LimitSettings = LimitSettings()
    engines: tuple[str, ...] | None = None
    """Names of the engines that serve it; by default all."""
    weight: _Weight = 1.0
    """Its share among the tenants of a class, where these wait for their turn."""
    timeouts: PhaseTimes = PhaseTimes()

    @model_validator(mode="after")
    def _default_is_allowed(self) -> Self:
        if self.default_class is not None and self.default_class not in self.classes:
            raise ValueError(
                f"default_class {self.default_class!r} is not among classes: {', '.join(self.classes)}"
            )
        return self

    @field_validator("engines")
    @classmethod
    def _some_engine(cls, engines: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if engines == ():
            raise ValueError("without any engine nothing can be asked: leave it out for all of them")
        return engines

    def named(self, name: str) -> Tenant:
        return Tenant(
            name=name,
            classes=self.classes,
            default_class=self.default_class or self.classes[0],
            limits=self.limits.limits(),
            engines=None if self.engines is None else frozenset(self.engines),
            weight=self.weight,
        )


class UsageSettings(BaseModel):
    """The record of what streams have used; docs/tenants.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    record: bool = True
    keep_days: int = Field(default=400, ge=1, le=36_500)
    """Older records are deleted."""


def check_names(
    classes: Mapping[str, ClassSettings], tenants: Mapping[str, TenantSettings], engines: set[str]
) -> None:
    """Raises `ValueError` for a name that cannot be one, or that names nothing."""
    for kind, names in (("classes", classes), ("tenants", tenants)):
        for name in names:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{kind}: {name!r} is no name: letters, digits, dots, dashes and underscores, at most 64"
                )
    known = {DEFAULT_CLASS, *classes}
    for name, tenant in tenants.items():
        if missing := [wanted for wanted in tenant.classes if wanted not in known]:
            raise ValueError(
                f"tenants.{name}.classes: there is no class {missing[0]!r}; "
                f"known are {', '.join(sorted(known))}"
            )
        if missing := [wanted for wanted in tenant.engines or () if wanted not in engines]:
            raise ValueError(
                f"tenants.{name}.engines: there is no engine {missing[0]!r}; "
                f"known are {', '.join(sorted(engines))}"
            )
    shares = sum(entry.share_floor for entry in classes.values())
    if shares > 1 + 1e-9:
        raise ValueError(f"classes: the share floors add up to {shares:g}, which is more than all")


def names_tenants(tenants: Mapping[str, TenantSettings]) -> bool:
    """Whether any tenant is configured but that of requests without a key."""
    return any(name != ANONYMOUS for name in tenants)
