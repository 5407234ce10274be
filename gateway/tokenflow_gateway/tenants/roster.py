"""The configured classes and tenants, ready to be asked."""

from __future__ import annotations

from collections.abc import Mapping

from tokenflow_gateway.relay.errors import Forbidden
from tokenflow_gateway.tenants.keys import KeyRecord
from tokenflow_gateway.tenants.model import ANONYMOUS, DEFAULT_CLASS, Principal, SlaClass, Tenant
from tokenflow_gateway.tenants.settings import ClassSettings, TenantSettings

__all__ = ["Roster"]


class Roster:
    """Says what a key is worth. Immutable: another configuration makes another roster."""

    def __init__(self, classes: Mapping[str, ClassSettings], tenants: Mapping[str, TenantSettings]) -> None:
        self.classes: Mapping[str, SlaClass] = {
            DEFAULT_CLASS: SlaClass(name=DEFAULT_CLASS),
            **{name: entry.named(name) for name, entry in classes.items()},
        }
        """By name; ``default`` is there in any case."""
        self.tenants: Mapping[str, Tenant] = {name: entry.named(name) for name, entry in tenants.items()}
        self.tells_class = bool(classes)
        """Whether answers name their class: where only one exists, it says nothing."""
        self._anonymous = _principal(self.tenant(ANONYMOUS))

    def tenant(self, name: str) -> Tenant:
        """One that is not configured has the rights of `Tenant`'s defaults."""
        return self.tenants.get(name) or Tenant(name=name)

    def anonymous(self) -> Principal:
        """Who asks without a key."""
        return self._anonymous

    def holder(self, record: KeyRecord, *, origin: str | None = None) -> Principal:
        """Who asks with this key; `origin` is `Principal.key_origin`.

        Raises `Forbidden` if the key is left with no class, or no engine.
        """
        tenant = self.tenant(record.tenant)
        classes = tuple(name for name in tenant.classes if record.classes is None or name in record.classes)
        engines = tenant.engines
        if record.engines is not None:
            engines = record.engines if engines is None else engines & record.engines
        if not classes or (engines is not None and not engines):
            raise Forbidden(
                f"the API key {record.id} is for classes or engines that the tenant {tenant.name!r} has not"
            )
        return Principal(
            tenant=tenant,
            key_id=record.id,
            classes=classes,
            default_class=tenant.default_class if tenant.default_class in classes else classes[0],
            limits=record.limits,
            engines=engines,
            key_origin=origin,
        )


def _principal(tenant: Tenant) -> Principal:
    """Who has all of the tenant's rights."""
    return Principal(
        tenant=tenant, classes=tenant.classes, default_class=tenant.default_class, engines=tenant.engines
    )
