"""Who opened a stream, and what is said to them about it: the vocabulary between link and book."""

from __future__ import annotations

from typing import NamedTuple

from tokenflow_engine.protocol import Aborted, Consumption, State, StreamClosed, StreamOpened

__all__ = ["Confirmation", "Delivery", "Owner", "Replaced", "Update"]


class Owner(NamedTuple):
    """One process of one gateway. Outlives its connection: a link that comes back finds its streams."""

    gateway_id: str
    incarnation: str


class Replaced(NamedTuple):
    """A gateway's new process has said hello: streams of its earlier ones have nobody left."""

    gateway_id: str
    incarnation: str
    """The new one."""


class Delivery(NamedTuple):
    """What the link hands to the scheduler thread."""

    owner: Owner
    message: StreamOpened | Consumption | StreamClosed | Replaced


class Update(NamedTuple):
    """What the scheduler thread hands to the link: a stream's state and its exact count of tokens."""

    owner: Owner
    rid: str
    state: State
    generated: int


class Confirmation(NamedTuple):
    """The end of a stream that its gateway closed."""

    owner: Owner
    message: Aborted
