"""Who may talk to this engine: the handshake, and the gateways that are connected now.

Pure: no sockets, no clock. Owned by the link's thread.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from tokenflow_engine.control.owners import Owner
from tokenflow_engine.protocol import LINK_TIMEOUT_S, PROTOCOL_VERSION, Hello, Refused

__all__ = ["Peers"]

_MAX_REMEMBERED = 1024


@dataclass(slots=True)
class _Peer:
    owner: Owner
    identity: bytes
    heard_at: float


class Peers:
    """Connections by ZeroMQ identity, gateways by id. Times are monotonic seconds."""

    def __init__(self, *, secret: str) -> None:
        self._secret = secret.encode()
        self._by_identity: dict[bytes, _Peer] = {}
        self._by_owner: dict[Owner, _Peer] = {}
        self._incarnations: dict[str, list[str]] = {}
        """Processes of each gateway in the order of their first hello; outlives their connections."""

    def admit(self, identity: bytes, hello: Hello, *, now: float) -> Refused | None:
        """Check a hello and remember its sender; None means welcome."""
        refusal = self._objection(hello)
        if refusal is not None:
            return refusal
        owner = Owner(hello.gateway_id, hello.incarnation)
        self._drop_gateway(hello.gateway_id)
        peer = _Peer(owner, identity, now)
        self._by_identity[identity] = self._by_owner[owner] = peer
        return None

    def succeeds_another(self, owner: Owner) -> bool:
        """Whether this welcome gateway is a new process of one known before. True once per process."""
        known = self._incarnations.pop(owner.gateway_id, [])
        is_new = owner.incarnation not in known
        self._incarnations[owner.gateway_id] = [*known, owner.incarnation][-8:] if is_new else known
        if len(self._incarnations) > _MAX_REMEMBERED:
            del self._incarnations[next(iter(self._incarnations))]
        return is_new and bool(known)

    def hear(self, identity: bytes, *, now: float) -> Owner | None:
        """The gateway behind a connection, alive at `now`; None if it has not said hello."""
        peer = self._by_identity.get(identity)
        if peer is None:
            return None
        peer.heard_at = now
        return peer.owner

    def identity(self, owner: Owner) -> bytes | None:
        """The connection of this gateway process, if there is one."""
        peer = self._by_owner.get(owner)
        return None if peer is None else peer.identity

    def identities(self) -> list[bytes]:
        """All connections that have said hello."""
        return list(self._by_identity)

    def drop_silent(self, now: float) -> list[Owner]:
        """Forget connections that said nothing for `LINK_TIMEOUT_S`; their streams are not touched."""
        silent = [p for p in self._by_identity.values() if now - p.heard_at > LINK_TIMEOUT_S]
        for peer in silent:
            self._drop(peer)
        return [peer.owner for peer in silent]

    def _objection(self, hello: Hello) -> Refused | None:
        if not hmac.compare_digest(hello.secret.encode(), self._secret):
            reason = "the secret is not this engine's: give both sides the same TOKENFLOW_LINK_SECRET"
            return Refused(code="bad_secret", reason=reason)
        if hello.version != PROTOCOL_VERSION:
            reason = (
                f"the gateway speaks version {hello.version} of the link, the engine {PROTOCOL_VERSION}: "
                "install the same release of tokenflow-serving on both sides"
            )
            return Refused(code="bad_version", reason=reason)
        if hello.incarnation in self._incarnations.get(hello.gateway_id, [])[:-1]:
            reason = (
                f"a newer process has taken over the gateway id {hello.gateway_id!r}: "
                "stop one of them, or give each gateway its own id"
            )
            return Refused(code="bad_message", reason=reason)
        return None

    def _drop_gateway(self, gateway_id: str) -> None:
        for peer in [p for p in self._by_identity.values() if p.owner.gateway_id == gateway_id]:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._by_identity.pop(peer.identity, None)
        self._by_owner.pop(peer.owner, None)
