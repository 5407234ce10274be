"""How the engine's requests are named after the stream they belong to.

One stream of the gateway can be several requests in the engine: `n > 1` samples, a list of prompts, or both.
The engine derives their ids from the stream's, but numbers them without saying how many there are, and gives
parallel samples random ids. The plugin names them itself, so that every request leads back to its stream and
the stream is known to be over exactly when all of them are:

- ``rid``: the stream's only request;
- ``rid_2of3``: its third request of three (the engine's own name would be ``rid_2``);
- ``rid_2of3_0123456789abcdef``: a parallel sample, or the run that fills the prefix cache before them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Lineage", "lineage", "name_parts", "name_sample"]

_CHILD = re.compile(r"(?P<stream>.+)_\d+of(?P<total>\d+)(?P<sample>_[0-9a-f]{16})?\Z", re.DOTALL)


class Lineage(NamedTuple):
    """The stream a request belongs to, and how many requests that stream has."""

    stream: str
    total: int
    is_sample: bool = False


def name_parts(rid: str, *, total: int) -> list[str]:
    """The ids of the `total` requests of stream `rid`."""
    return [f"{rid}_{i}of{total}" for i in range(total)]


def name_sample(part: str, *, unique: str) -> str:
    """The id of one parallel sample of `part`; `unique` is random hexadecimal, at least 16 digits."""
    return f"{part}_{unique[:16]}"


def lineage(rid: str) -> Lineage:
    """Where a request comes from, by its name alone: itself, unless the name says otherwise."""
    found = _CHILD.match(rid)
    if found is None:
        return Lineage(rid, 1)
    return Lineage(found["stream"], int(found["total"]), found["sample"] is not None)
