"""Who is let in: a request's key, or the absence of one, against the keys and the configuration."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from tokenflow_gateway.config import Settings, is_loopback
from tokenflow_gateway.relay.errors import Forbidden, Unauthorized
from tokenflow_gateway.relay.upstream import CREDENTIALS
from tokenflow_gateway.tenants.keyring import Keyring
from tokenflow_gateway.tenants.keys import KEY_PREFIX, KeyRecord, parse_key
from tokenflow_gateway.tenants.model import KeyKind, Principal
from tokenflow_gateway.tenants.roster import Roster
from tokenflow_gateway.tenants.settings import names_tenants

__all__ = ["IDENTITY_PREFIX", "Access", "Validity", "without_keys"]

Headers = Iterable[tuple[bytes, bytes]]

IDENTITY_PREFIX: Final = b"x-openwebui-user-"
"""Headers in which Open WebUI says whom it asks for."""
_KEY_INSIDE: Final = re.compile(rb"tf-[a-z0-9]{12}-[A-Za-z0-9]{43}")
_HOW: Final = "send it as `Authorization: Bearer tf-...` or `x-api-key: tf-...`"
_NO_KEYS: Final = (
    "this gateway knows no API keys, this one neither: make one with `tokenflow keys create` for its "
    "state_dir, or send none where none is needed"
)
_NEEDED: Final = (
    f"this gateway needs an API key: {_HOW}. Whoever runs it makes one with `tokenflow keys create`"
)


class Validity(NamedTuple):
    """For how long what has been decided of a request is decided for others with the same head."""

    keys: int
    """The keyring's version."""
    until: float
    """Unix seconds."""


class Access:
    """Decides for one configuration. Takes microseconds, and waits for nothing."""

    def __init__(self, settings: Settings, keyring: Keyring) -> None:
        self._keyring = keyring
        self._mode = settings.anonymous
        self._on_loopback = is_loopback(settings.host)
        self._proxies = settings.trusted_proxies
        self._names_tenants = names_tenants(settings.tenants)
        token = settings.admin_token
        self._admin_token = None if token is None else token.get_secret_value().encode()
        self.roster = Roster(settings.classes, settings.tenants)

    @property
    def allows_anonymous(self) -> bool:
        """Whether requests may come without a key now."""
        if self._mode == "auto":
            return self._on_loopback and not self._names_tenants and not self._keyring.in_use
        return self._mode == "allow"

    @property
    def separates_tenants(self) -> bool:
        """Whether there may be several, each of which is to see its own alone."""
        return self._names_tenants or self._keyring.in_use

    def client(self, headers: Headers, *, query: bytes = b"") -> Principal:
        """Who wants something of an engine. Raises `Unauthorized` or `Forbidden`."""
        if query and _KEY_INSIDE.search(query):
            raise Unauthorized(f"an API key has no place in a URL, which ends in logs: {_HOW}")
        record = self._record(headers)
        if record is None:
            if self.allows_anonymous:
                return self.roster.anonymous()
            raise Unauthorized(_NEEDED)
        if record.kind != "client":
            raise Forbidden(f"this is a key of kind {record.kind!r}: for text, use one of kind 'client'")
        return self.roster.holder(record, origin=self._keyring.origin(record.id))

    def validity(self, principal: Principal) -> Validity:
        """Of what `client` has just answered."""
        return Validity(self._keyring.version, self._keyring.ends_at(principal.key_id))

    def holds(self, validity: Validity) -> bool:
        """Whether it would be answered again."""
        return validity.keys == self._keyring.version and self._keyring.now < validity.until

    def admin(self, headers: Headers) -> None:
        """Lets in who may see and change the gateway itself. Raises `Unauthorized` or `Forbidden`."""
        self._operator(headers, ("admin",))

    def monitor(self, headers: Headers) -> None:
        """Lets in who may read metrics: everybody, where requests need no key. Raises the same."""
        if not self._keyring.in_use and self._mode != "deny":
            return
        self._operator(headers, ("admin", "monitor"))

    def passed_on(
        self, headers: list[tuple[bytes, bytes]], principal: Principal, *, peer: str | None
    ) -> list[tuple[bytes, bytes]]:
        """What the rest of the gateway may see: no key, and no identity that is not to be trusted."""
        headers = without_keys(headers, authenticated=principal.key_id is not None)
        if self._trusts(peer):
            return headers
        return [header for header in headers if not header[0].startswith(IDENTITY_PREFIX)]

    # ---- inside ------------------------------------------------------------------------------------

    def _trusts(self, peer: str | None) -> bool:
        """Whether the other end of the connection is a configured proxy."""
        if not self._proxies or peer is None:
            return False
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._proxies)

    def _record(self, headers: Headers) -> KeyRecord | None:
        """The record of the request's key; None for none. Raises `Unauthorized` for one that is not valid."""
        given = {token for token in _tokens(headers) if token.startswith(KEY_PREFIX)}
        if not given:
            return None
        if len(given) > 1:
            raise Unauthorized("two different API keys came with this request: send one")
        key = parse_key(given.pop())
        if key is None:
            raise Unauthorized(f"what came as an API key is none, or not all of one: {_HOW}")
        if not self._keyring.in_use:
            raise Unauthorized(_NO_KEYS)
        return self._keyring.find(key)

    def _operator(self, headers: Headers, kinds: tuple[KeyKind, ...]) -> None:
        headers = list(headers)
        if self._has_admin_token(headers):
            return
        record = self._record(headers) if self._keyring.in_use else None
        if record is not None:
            if record.kind not in kinds:
                raise Forbidden(f"this API key is of kind {record.kind!r}: use one of {' or '.join(kinds)}")
            return
        if self._admin_token is not None:
            raise Unauthorized("the admin views need the admin token as bearer token")
        if self._keyring.in_use:
            raise Unauthorized(f"this needs an API key of kind {' or '.join(kinds)}: {_HOW}")
        if not self._on_loopback:
            raise Forbidden("set TOKENFLOW_ADMIN_TOKEN to open the admin views beyond loopback")

    def _has_admin_token(self, headers: Headers) -> bool:
        if self._admin_token is None:
            return False
        tokens = [token.encode("latin-1") for token in _tokens(headers)]
        return any(hmac.compare_digest(token, self._admin_token) for token in tokens)


def without_keys(headers: list[tuple[bytes, bytes]], *, authenticated: bool) -> list[tuple[bytes, bytes]]:
    """The headers as others may see them: no key of ours in any, and no credential that was for us."""
    return [
        header
        for header in headers
        if not (authenticated and header[0] in CREDENTIALS)
        and not (b"tf-" in header[1] and _KEY_INSIDE.search(header[1]))
    ]


def _tokens(headers: Headers) -> list[str]:
    """What a request shows as its credentials."""
    found = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.decode("latin-1").strip().partition(" ")
            if scheme.lower() == "bearer":
                found.append(token.strip())
        elif name in CREDENTIALS:
            found.append(value.decode("latin-1").strip())
    return found
