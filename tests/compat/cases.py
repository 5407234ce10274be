"""Which client is tried with which feature, and how a test says what it found."""

from __future__ import annotations

from typing import Protocol

import pytest

from compat.clients import CLIENTS
from compat.features import Feature

__all__ = ["Named", "Record", "can"]


class Named(Protocol):
    """A client as the matrix names it."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...


class Record(Protocol):
    """Names the place in the matrix that a test fills, with what stands there if it passes."""

    def __call__(self, client: Named, row: str, table: str, found: str = "yes") -> None: ...


def can(*features: Feature) -> pytest.MarkDecorator:
    """Each client with each of these features that it has."""
    pairs = [
        (client, feature) for client in CLIENTS for feature in features if feature.name not in client.cannot
    ]
    ids = [f"{client.name.replace(' ', '-')}-{feature.name}" for client, feature in pairs]
    return pytest.mark.parametrize(("client", "feature"), pairs, ids=ids, indirect=["client"])
