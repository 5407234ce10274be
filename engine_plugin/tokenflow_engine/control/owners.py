"""Who opened a stream, and what is said to them about it: the vocabulary between link and book."""

from __future__ import annotations

from typing import NamedTuple

from tokenflow_engine.protocol import Aborted, Consumption, SetPolicy, State, StreamClosed, StreamOpened

__all__ = ["Confirmation", "Delivery", "Lost", "Owner", "Replaced", "Update"]


class Owner(NamedTuple):
    """One process of one gateway. Outlives its connection: a link that comes back finds its streams."""

    gateway_id: str
    incarnation: str


class Replaced(NamedTuple):
    """Processes of a gateway have gone silent and a newer one is known: their streams have nobody left."""

    gateway_id: str
    gone: tuple[str, ...]
    """Their incarnations."""


class Lost(NamedTuple):
    """A gateway has gone silent: its streams go on, and nobody reports on their readers."""


class Delivery(NamedTuple):
    """What the link hands to the scheduler thread."""

    owner: Owner
    message: StreamOpened | Consumption | StreamClosed | SetPolicy | Replaced | Lost


class Update(NamedTuple):
    """What the scheduler thread hands to the link: a stream's state, its exact count, its reader's buffer."""

    owner: Owner
    rid: str
    state: State
    generated: int
    buffered: float | None = None
    """Tokens not read yet, by what is known of the reader."""
    reason: str | None = None
    """Why it waits or is parked."""
    offloaded: bool = False
    """Its KV is off the device, or on its way back."""


class Confirmation(NamedTuple):
    """The end of a stream that its gateway closed."""

    owner: Owner
    message: Aborted
