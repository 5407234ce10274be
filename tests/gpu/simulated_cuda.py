"""CUDA's streams and events without a GPU: the order in which a GPU might run what it was given.

Work that is put on a stream waits in it. The simulation takes from the streams in an order drawn by chance,
bound by nothing but what CUDA promises: a stream runs in order, and a wait holds it back until the event is
recorded. What is right only because of luck with the timing is thus wrong in some of the runs.
"""

# ruff: noqa: S311 - chance is not for secrets

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Simulation"]

_DEFERRED = {torch.index_select, torch.Tensor.index_copy_, torch.Tensor.copy_}
"""What is work for the device. All else, views above all, happens at once, as it would on the host."""


class Simulation:
    """Takes the place of `torch.cuda` once installed; tensors stay on the CPU."""

    def __init__(self) -> None:
        self._streams: list[_Stream] = []
        self._chance = random.Random(0)
        self._default = _Stream(self)

    def install(self) -> None:
        replaced: dict[str, Any] = {
            "Stream": lambda _device=None: _Stream(self),
            "Event": lambda enable_timing=False: _Event(self),
            "stream": _launching,
            "current_stream": lambda _device=None: self._default,
            "default_stream": lambda _device=None: self._default,
            "device": lambda _device: contextlib.nullcontext(),
            "synchronize": lambda _device=None: self.run_all(),
            "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
            "_sleep": lambda _cycles: None,
        }
        for name, replacement in replaced.items():
            setattr(torch.cuda, name, replacement)

    def seed(self, seed: int) -> None:
        """Another order: other streams are the slow ones, up to a thousand times slower."""
        self._chance.seed(seed)
        for stream in self._streams:
            stream.speed = self.speed()

    def speed(self) -> float:
        return 10 ** self._chance.uniform(-3, 0)

    def run_some(self) -> None:
        """The device goes on a little while the host looks."""
        for _ in range(self._chance.randrange(12)):
            self._run_one()

    def run_all(self) -> None:
        while self._run_one():
            pass
        assert not any(stream.work for stream in self._streams), "streams wait for each other"

    def _run_one(self) -> bool:
        ready = [stream for stream in self._streams if stream.is_ready]
        if not ready:
            return False
        (stream,) = self._chance.choices(ready, [stream.speed for stream in ready])
        stream.work.popleft()[1]()
        return True


class _Stream:
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.work: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        """Whether it can run, and what it is."""
        self.speed = simulation.speed()
        simulation._streams.append(self)

    @property
    def is_ready(self) -> bool:
        return bool(self.work) and self.work[0][0]()

    def put(self, work: Callable[[], None], *, after: Callable[[], bool] = lambda: True) -> None:
        self.work.append((after, work))

    def wait_event(self, event: _Event) -> None:
        """For what was recorded last before this call, as CUDA does."""
        awaited = event.recorded
        self.put(lambda: None, after=lambda: event.reached >= awaited)

    def wait_stream(self, other: _Stream) -> None:
        event = _Event(self.simulation)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.simulation.run_all()


class _Event:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.recorded = 0
        self.reached = 0

    def record(self, stream: _Stream) -> None:
        self.recorded += 1
        number = self.recorded
        stream.put(lambda: setattr(self, "reached", number))

    def query(self) -> bool:
        self._simulation.run_some()
        return self.reached >= self.recorded

    def elapsed_time(self, end: _Event) -> float:
        assert self.reached == self.recorded
        assert end.reached == end.recorded
        return 1.0


class _Deferring(TorchFunctionMode):
    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DEFERRED:
            return func(*args, **(kwargs or {}))
        self._stream.put(lambda: func(*args, **(kwargs or {})))
        return args[0]


@contextlib.contextmanager
def _launching(stream: _Stream) -> Iterator[None]:
    with _Deferring(stream):
        yield
