"""From wishes and rights to what a request gets."""

from __future__ import annotations

from tokenflow_engine.protocol import Reader
from tokenflow_gateway.relay.errors import BadRequest
from tokenflow_gateway.tenants.model import ANONYMOUS, Grant, Principal, SlaClass, Tenant
from tokenflow_gateway.tenants.roster import Roster
from tokenflow_gateway.tenants.wishes import Wishes, priority_factor

__all__ = ["NO_GRANT", "grant", "grant_headers"]

NO_GRANT = Grant(principal=Principal(tenant=Tenant(name=ANONYMOUS)), sla=Roster({}, {}).classes["default"])
"""Of requests that nobody has judged: the rights of a gateway without any configuration."""


def grant(
    roster: Roster, principal: Principal, wishes: Wishes, *, reader: Reader, rate: float | None
) -> Grant:
    """What this request gets. Raises `BadRequest` for a class that does not exist, where any are configured.

    `rate`: declared by the client, in tokens per second. A class that is not the principal's is replaced by
    the largest of its own that is not larger, or else by its default.
    """
    reduced = []
    sla = _granted_class(roster, principal, wishes.sla)
    if wishes.sla is not None and sla.name != wishes.sla:
        reduced.append("sla")
    ttft_s = max(sla.ttft_s, wishes.ttft_s or 0.0)
    if wishes.ttft_s is not None and wishes.ttft_s < sla.ttft_s:
        reduced.append("ttft")
    rate = wishes.rate if rate is None else rate
    if rate is not None and sla.max_rate is not None and rate > sla.max_rate:
        rate = sla.max_rate
        reduced.append("rate")
    weight = sla.weight * priority_factor(wishes.priority)
    if weight > sla.max_weight:
        weight = sla.max_weight
        reduced.append("priority")
    return Grant(
        principal=principal,
        sla=sla,
        reader=reader,
        declared_rate=None if rate is None else max(rate, sla.rate_floor or 0.0),
        weight=weight,
        ttft_s=ttft_s,
        may_park=sla.may_park,
        fairness_id=wishes.fairness_id,
        reduced=tuple(reduced),
    )


def grant_headers(granted: Grant, *, tells_class: bool) -> list[tuple[bytes, bytes]]:
    """What the answer says of it: its class where there is a choice, and what was not granted in full."""
    headers = []
    if tells_class:
        headers.append((b"x-tokenflow-sla", granted.sla.name.encode()))
    if granted.reduced:
        headers.append((b"x-tokenflow-reduced", ", ".join(granted.reduced).encode()))
    return headers


def _granted_class(roster: Roster, principal: Principal, wanted: str | None) -> SlaClass:
    classes = roster.classes
    default = classes[principal.default_class]
    if wanted is None:
        return default
    if wanted in principal.classes:
        return classes[wanted]
    if wanted not in classes:
        if not roster.tells_class:
            return default
        raise BadRequest(
            f"there is no class {wanted!r}: X-TokenFlow-SLA may be one of {', '.join(principal.classes)}"
        )
    smaller = [classes[name] for name in principal.classes if classes[name].weight <= classes[wanted].weight]
    return max(smaller, key=lambda sla: sla.weight, default=default)
