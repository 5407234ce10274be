"""All of many, looked at again and again: a few at a time, so that nobody waits while it is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

__all__ = ["AT_A_TIME", "one_round"]

AT_A_TIME = 40
"""A look takes some 10 to 20 us: other streams' text waits for as many, and not for hundreds in a row."""

_Thing = TypeVar("_Thing")


async def one_round(things: Iterable[_Thing], *, within_s: float) -> AsyncIterator[list[_Thing]]:
    """All there is, `AT_A_TIME` or fewer together, evenly over `within_s`, which it takes in any case.

    A list is its taker's until the next one is asked for; the last is emptied then.
    What comes before the first part is looked at, too; what comes later, in the next round. A round that is
    late catches up, with a turn of the event loop for everybody else in between.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await asyncio.sleep(within_s / _parts(len(list(things))))
    waiting = list(things)
    parts, now = _parts(len(waiting)), waiting
    try:
        for part in range(parts):
            await asyncio.sleep(max(0.0, begun + within_s * (part + 1) / parts - loop.time()))
            now = waiting[part::parts]
            yield now
    finally:  # frames of who is cancelled may live on with the exception, and are to keep nothing
        waiting.clear()
        now.clear()


def _parts(count: int) -> int:
    return max(1, -(-count // AT_A_TIME))
