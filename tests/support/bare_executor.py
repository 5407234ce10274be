"""The executor without an engine: what it knows of SGLang is replaced by lists."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

__all__ = ["PAGE", "Batch", "Request", "bare_executor", "new_request", "new_scheduler"]

PAGE = 16
_REPLACED = ("host", "rows")
_RELOADED = ("memory", "tier", "executor")
"""Modules that import those."""


@dataclass(eq=False)
class Request:
    rid: str
    kv: Any
    to_finish: None = None
    prefix_len: int = 0
    multimodal_inputs: None = None

    @property
    def seqlen(self) -> int:
        return int(self.kv.kv_committed_len) + 1

    def finished(self) -> bool:
        return False


@dataclass
class Batch:
    reqs: list[Request] = field(default_factory=list)
    batch_is_full: bool = True
    return_logprob: bool = False

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(self, reqs_to_exclude: list[Request]) -> None:
        self.reqs = [req for req in self.reqs if req not in reqs_to_exclude]

    def merge_batch(self, other: Batch) -> None:
        self.reqs = [*self.reqs, *other.reqs]


def new_request(rid: str, tokens: int) -> Request:
    """One that runs."""
    return Request(rid, SimpleNamespace(kv_committed_len=tokens, holds_kv=True, req_pool_idx=0))


def new_scheduler(*reqs: Request) -> Any:
    """One that runs these; `freed` has the rids of those whose slots were given up, in order."""
    scheduler = SimpleNamespace(
        result_queue=deque(),
        running_batch=Batch([*reqs]),
        waiting_queue=[],
        max_queued_requests=None,
        chunked_req=None,
        page_size=PAGE,
        req_to_token_pool=SimpleNamespace(available_size=lambda: 8),
        max_total_num_tokens=4096,
        freed=[],
        _build_hisparse_decode_batch=lambda reqs: Batch([*reqs]),
    )

    def add(req: Request, *, is_retracted: bool) -> None:
        assert is_retracted
        scheduler.waiting_queue.append(req)

    scheduler._add_request_to_queue = add
    return scheduler


def bare_executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """The class. Slots of a request's tokens are numbered from 0, or from its `first_slot`."""
    names = {name: f"tokenflow_engine.sglang.{name}" for name in (*_REPLACED, *_RELOADED)}
    host, rows = ModuleType(names["host"]), ModuleType(names["rows"])
    host.HostRefusedError = RuntimeError  # type: ignore[attr-defined]
    rows.free_tokens = lambda _scheduler: 4096  # type: ignore[attr-defined]
    rows.row_of = lambda _scheduler, req: _slots(req)  # type: ignore[attr-defined]
    rows.give_up = lambda scheduler, req, **_: scheduler.freed.append(req.rid)  # type: ignore[attr-defined]
    rows.forget_kv = lambda req: setattr(req.kv, "holds_kv", False)  # type: ignore[attr-defined]
    rows.take = _take  # type: ignore[attr-defined]
    import tokenflow_engine.sglang as package

    for name, module in (("host", host), ("rows", rows)):
        monkeypatch.setitem(sys.modules, names[name], module)
        monkeypatch.setattr(package, name, module, raising=False)
    _forget(monkeypatch, names, package)
    from tokenflow_engine.sglang import executor as under_test

    monkeypatch.setattr(under_test, "why_request_is_fixed", lambda _req: None)
    monkeypatch.setattr(under_test.memory, "private_tokens", lambda req: req.kv.kv_committed_len)
    yield under_test.Executor
    _forget(monkeypatch, names, package)


def _forget(monkeypatch: pytest.MonkeyPatch, names: dict[str, str], package: ModuleType) -> None:
    for name in _RELOADED:
        monkeypatch.delitem(sys.modules, names[name], raising=False)
        monkeypatch.delattr(package, name, raising=False)


def _slots(req: Request) -> range:
    first = getattr(req.kv, "first_slot", 0)
    return range(first, first + req.kv.kv_committed_len)


def _take(_scheduler: Any, req: Request, *, spare: int) -> range:
    del spare
    req.kv.holds_kv = True
    return _slots(req)
