"""Progress reports that come to another replica than their stream's."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from tokenflow_gateway.store.messages import Messages, NoAnswer
from tokenflow_gateway.store.redis import FleetStore, StoreDown
from tokenflow_gateway.workers.peers import Forwarded, PeerAnswer, Unreachable

__all__ = ["FleetReports"]

_LOOK_EVERY_S: Final = 0.2
"""How often strange capabilities may have the list of replicas read anew."""


class FleetReports:
    """Hands them to the replica that granted their capability (`api.progress.Owners`)."""

    def __init__(self, store: FleetStore, messages: Messages) -> None:
        self._store = store
        self._messages = messages
        self._looked = 0.0

    async def ask(self, owner: str, report: Forwarded) -> PeerAnswer:
        """Raises `Unreachable`."""
        try:
            answer = await self._messages.ask(owner, msgspec.msgpack.encode(report))
            return msgspec.msgpack.decode(answer, type=PeerAnswer)
        except (NoAnswer, msgspec.DecodeError) as error:
            gone = isinstance(error, NoAnswer) and error.gone
            raise Unreachable(owner, gone=gone) from error

    async def refresh(self) -> bool:
        """Look who has joined: the stream may be of a replica that is new. False if that was just done."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return False
        self._looked = now
        try:
            await self._store.refresh_members()
        except StoreDown:
            return False
        return True
