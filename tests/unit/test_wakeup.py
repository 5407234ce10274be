"""A bell between two threads, one of which may run in the middle of what the other one does."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator

import pytest

from tokenflow_engine.control.wakeup import Wakeup


@pytest.fixture
def bell() -> Iterator[Wakeup]:
    bell = Wakeup()
    yield bell
    bell.close()


def is_readable(bell: Wakeup) -> bool:
    return bool(select.select([bell.fileno()], [], [], 0)[0])


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, *, before: Callable[[], None], after: Callable[[], None]
) -> None:
    """What the other thread does just before and just after the descriptor is written to."""
    write = os.eventfd_write

    def interrupted(fd: int, value: int) -> None:
        before()
        write(fd, value)
        after()

    monkeypatch.setattr(os, "eventfd_write", interrupted)


def test_rings_before_a_clear_are_one(bell: Wakeup) -> None:
    assert not is_readable(bell)
    bell.ring()
    bell.ring()
    assert is_readable(bell)
    bell.clear()
    assert not is_readable(bell)


def test_who_is_woken_by_a_ring_can_clear_it_at_once(bell: Wakeup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would go round in vain for as long as it holds the interpreter: five milliseconds."""
    seen: list[bool] = []

    def woken() -> None:
        bell.clear()
        seen.append(is_readable(bell))

    meanwhile(monkeypatch, before=lambda: None, after=woken)
    bell.ring()
    assert seen == [False]


def test_a_clear_that_comes_too_early_leaves_the_ring_to_the_next_one(
    bell: Wakeup, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, before=bell.clear, after=lambda: None)
    bell.ring()
    assert is_readable(bell)
    bell.clear()
    assert not is_readable(bell)
