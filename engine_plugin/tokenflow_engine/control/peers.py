"""Who may talk to this engine: the handshake, and the gateways that are connected now.

Pure: no sockets, no clock. Owned by the link's thread.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Literal

from tokenflow_engine.control.owners import Owner
from tokenflow_engine.protocol import LINK_TIMEOUT_S, PROTOCOL_VERSION, Hello, Refused

__all__ = ["Peers"]

_MAX_REMEMBERED = 1024
_MAX_INCARNATIONS = 8

_Silence = Literal["no", "yes", "reported"]


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
        self._incarnations: dict[str, dict[str, _Silence]] = {}
        """Processes of each gateway in the order of their first hello; outlives their connections."""

    def admit(self, identity: bytes, hello: Hello, *, now: float) -> Refused | None:
        """Check a hello and remember its sender; None means welcome."""
        refusal = self._objection(hello)
        if refusal is not None:
            return refusal
        owner = Owner(hello.gateway_id, hello.incarnation)
        before = self._by_identity.get(identity)
        for replaced in {owner} if before is None else {owner, before.owner}:
            self.forget(replaced)
        peer = _Peer(owner, identity, now)
        self._by_identity[identity] = self._by_owner[owner] = peer
        self._remember(owner)
        return None

    def newly_gone(self, gateway_id: str) -> tuple[str, ...]:
        """Incarnations that went silent and have a newer one, each told once a silence."""
        known = self._incarnations.get(gateway_id, {})
        gone = tuple(incarnation for incarnation in list(known)[:-1] if known[incarnation] == "yes")
        known.update(dict.fromkeys(gone, "reported"))
        return gone

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
        silent = [p.owner for p in self._by_identity.values() if now - p.heard_at > LINK_TIMEOUT_S]
        for owner in silent:
            self.forget(owner)
            self._incarnations.setdefault(owner.gateway_id, {})[owner.incarnation] = "yes"
        return silent

    def forget(self, owner: Owner) -> None:
        """Drop this process's connection, if there is one: it has to say hello again."""
        peer = self._by_owner.pop(owner, None)
        if peer is not None:
            self._by_identity.pop(peer.identity, None)

    def _remember(self, owner: Owner) -> None:
        """Enter a process as heard of; its place among its gateway's processes stays the first it had."""
        known = self._incarnations.pop(owner.gateway_id, {})
        known[owner.incarnation] = "no"
        self._incarnations[owner.gateway_id] = known
        away = [i for i in known if Owner(owner.gateway_id, i) not in self._by_owner]
        for incarnation in away[: max(0, len(known) - _MAX_INCARNATIONS)]:
            del known[incarnation]
        if len(self._incarnations) > _MAX_REMEMBERED:
            del self._incarnations[next(iter(self._incarnations))]

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
        return None
