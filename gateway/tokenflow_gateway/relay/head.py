"""What the head of a request says: worked out once for a connection whose requests have the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenflow_gateway.config import KeepAliveSettings, Timeouts
from tokenflow_gateway.relay.request import ReaderFields
from tokenflow_gateway.relay.upstream import ClientHeaders, Header
from tokenflow_gateway.tenants.access import Access, Validity
from tokenflow_gateway.tenants.limits import Subject
from tokenflow_gateway.tenants.model import Grant, Principal

if TYPE_CHECKING:
    from tokenflow_gateway.relay.exchange import Exchange

__all__ = ["Head", "Wants"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What it asks for, where text is to be generated."""

    reader: ReaderFields
    identity: str | None
    """Whom a front end asks for."""
    grant: Grant
    """What it gets, if its body asks for nothing else."""
    paced: bool
    keep_alive: KeepAliveSettings


@dataclass(slots=True, kw_only=True, eq=False)
class Head:
    """What `access` has let in. Its `x-request-id` and length are no part of it."""

    method: str
    path: str
    query: bytes
    came: list[Header]
    access: Access
    validity: Validity
    principal: Principal
    subjects: tuple[Subject, ...]
    """Whose limits it counts for."""
    passed: ClientHeaders
    """Its headers, as the rest of the gateway may see them."""
    route: str | None
    timeouts: Timeouts
    usual: Timeouts
    """Of tenants that name none of their own."""
    wants: Wants | None = None
    """Where somebody has asked."""

    def is_of(self, exchange: Exchange, access: Access) -> bool:
        """Whether this request, on the same connection, has the same head, and is still let in with it."""
        return (
            self.came == exchange.headers
            and self.path == exchange.path
            and self.query == exchange.scope["query_string"]
            and self.method == exchange.method
            and self.access is access
            and access.holds(self.validity)
        )
