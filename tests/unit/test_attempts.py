"""Which engines a request is tried on, and after which failures another one is asked."""

from __future__ import annotations

import pytest

from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.relay.attempts import Attempts, retry_reason
from tokenflow_gateway.relay.errors import (
    BadStream,
    ConnectTimeout,
    EngineAborted,
    EngineFailed,
    EngineUnreachable,
    FirstByteTimeout,
    IdleTimeout,
    NoEngine,
    RelayError,
    StreamTruncated,
    TotalTimeout,
)


def engine(port: int, model: str = "a") -> Engine:
    made = Engine(EngineConfig(url=f"http://127.0.0.1:{port}"), healthy=True)
    made.models = ({"id": model},)
    return made


@pytest.mark.parametrize(("most", "tried"), [(1, 1), (2, 2), (5, 3)])
def test_each_engine_of_the_model_once_and_no_more_than_allowed(most: int, tried: int) -> None:
    engines = [engine(1), engine(2), engine(3), engine(4, "b")]
    attempts = Attempts(EngineRegistry(engines), "a", most=most)
    asked = [attempts.first]
    while (another := attempts.another()) is not None:
        asked.append(another)
    assert len(asked) == len(set(asked)) == tried
    assert engines[3] not in asked


def test_one_that_has_fallen_ill_meanwhile_is_not_asked() -> None:
    first, second = engine(1), engine(2)
    attempts = Attempts(EngineRegistry([first, second]), "a", most=2)
    second.healthy = False
    assert attempts.another() is None


@pytest.mark.parametrize(
    ("error", "idle", "reason"),
    [
        (NoEngine("refused"), False, "refused"),
        (ConnectTimeout.after(1), False, "connect_timeout"),
        (EngineUnreachable("lost"), True, "lost"),
        (EngineUnreachable("lost"), False, None),
        (EngineFailed(b'{"error":{"message":"full","code":503}}'), True, "busy"),
        (EngineFailed(b'{"error":{"message":"full","code":503}}'), False, None),
        (EngineFailed(b'{"error":{"message":"bad","code":500}}'), True, None),
        *[
            (error, True, None)
            for error in (
                FirstByteTimeout.after(1),
                IdleTimeout.after(1),
                TotalTimeout.after(1),
                StreamTruncated("cut"),
                BadStream("bad"),
                EngineAborted("given up"),
            )
        ],
    ],
)
def test_another_one_only_where_the_first_did_nothing(
    error: RelayError, *, idle: bool, reason: str | None
) -> None:
    assert retry_reason(error, idle=idle) == reason
