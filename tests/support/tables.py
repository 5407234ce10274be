"""A table of requests as the plugin keeps it, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tokenflow_engine.control.streams import ReaderView
from tokenflow_engine.policy.base import EngineView
from tokenflow_engine.sglang.table import Device, Table

__all__ = ["DEVICE", "READER", "FakeRequest", "FlatCosts", "SameReaders", "arrive", "new_table", "view_of"]

DEVICE = Device(
    kv_tokens=4096,
    kv_free=1000,
    kv_freeing=16,
    max_running=8,
    max_resident=12,
    page_tokens=16,
    host_free=2000,
)
READER = ReaderView(3.0, 5.0, 4.0, 6.0, False, False, 2.0, 0.5, float("inf"), True)


@dataclass
class FakeRequest:
    """What the table asks of a request of SGLang."""

    rid: str
    origin_input_ids: list[int] = field(default_factory=lambda: [0] * 10)
    extend_end: int = 4
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(max_new_tokens=50))


def new_table(*, parkable: bool = True, shared_tokens: Callable[[Any], int] = lambda _req: 16) -> Table:
    """Each request shares its first page of 16 tokens with others, and host memory holds 100 of each."""
    return Table(may_park=lambda _req: parkable, shared_tokens=shared_tokens, synced_tokens=lambda _rid: 100)


def view_of(table: Table, *, now: float = 10.0) -> tuple[EngineView, list[str]]:
    view, names = table.view(now=now, device=DEVICE, costs=FlatCosts())
    return view, list(names)


class SameReaders:
    """All requests are read by `READER`, and nothing changes that."""

    def reader(self, _rid: str, _now: float) -> ReaderView:
        return READER

    def take_changed_readers(self) -> Iterable[str]:
        return ()


class FlatCosts:
    def decode_s(self, batch: int, context_tokens: float) -> float:
        return 0.01

    def prefill_s(self, tokens: float) -> float:
        return 0.01

    def load_s(self, tokens: float) -> float:
        return 0.01

    turn_s = 0.0

    def evict_s(self, tokens: float) -> float:
        return 0.01


def arrive(table: Table, *rids: str) -> None:
    for i, rid in enumerate(rids):
        table.arrived(rid, prompt=7, max_output=99, now=float(i))
        table.known(FakeRequest(rid))
        table.read_by(rid, READER, now=float(i))
