"""One real engine for all tests that do not change it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.engine_nursery import EngineNursery
from support.raw_link import RawLink
from support.real_engine import RealEngine, engine_python, tokenflow_home
from support.tiny_model import tiny_model
from tokenflow_engine.protocol import Welcome

TINY_ARGS = [
    *("--dtype", "float32"),
    *("--page-size", "16"),
    *("--max-total-tokens", "16384"),
    *("--max-running-requests", "12"),
    *("--chunked-prefill-size", "64"),  # small, so that a long prompt takes many steps
    "--enable-response-store",  # without which there are no responses in the background
]
PYTHON_PATH = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(
    os.pathsep
)
"""For engines that are started with modules of `support`."""


@pytest.fixture(scope="session")
def tiny_model_path() -> Path:
    return tiny_model(tokenflow_home() / "models", python=engine_python())


@pytest.fixture(scope="session")
def nursery() -> Iterator[EngineNursery]:
    with EngineNursery(engine_python(), PYTHON_PATH) as nursery:
        yield nursery


@pytest.fixture(scope="session")
def new_engine(tiny_model_path: Path, nursery: EngineNursery) -> Callable[..., RealEngine]:
    """Makes engines like `tiny_engine`, not started, with `env` and further `args`.

    They are forked, but for those that import from elsewhere: `probed`, by `support.probed_launch`, or with a
    ``PYTHONPATH`` in `env`.
    """

    def make(*args: str, env: dict[str, str] | None = None, probed: bool = False) -> RealEngine:
        given = [*TINY_ARGS, *args]
        if not probed:
            forks = None if env and "PYTHONPATH" in env else nursery
            return RealEngine(tiny_model_path, args=given, env=env, nursery=forks)
        env = {**(env or {}), "PYTHONPATH": PYTHON_PATH}
        return RealEngine(tiny_model_path, args=given, env=env, module="support.probed_launch")

    return make


@pytest.fixture(scope="session")
def tiny_engine(tiny_model_path: Path) -> Iterator[RealEngine]:
    """Started as `tokenflow up` does."""
    with RealEngine(tiny_model_path, args=TINY_ARGS) as engine:
        yield engine


@pytest.fixture
def link(tiny_engine: RealEngine) -> Iterator[RawLink]:
    """A gateway that is welcome at `tiny_engine`, new for each test."""
    with RawLink(tiny_engine.link, secret=tiny_engine.secret, gateway_id=uuid.uuid4().hex) as link:
        assert isinstance(link.hello(), Welcome)
        yield link
