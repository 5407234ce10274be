"""Which engine gets a request, and what is said when none does."""

from __future__ import annotations

import pytest

from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.relay.errors import ModelNotFound, NoEngine


def engine(port: int, *models: str, healthy: bool = True) -> Engine:
    made = Engine(EngineConfig(url=f"http://127.0.0.1:{port}"))
    made.models = tuple({"id": model} for model in models)
    made.healthy = healthy
    made.health_reason = None if healthy else "connection refused"
    return made


def test_the_least_busy_engine_of_the_model() -> None:
    busy, idle, other = engine(1, "a"), engine(2, "a"), engine(3, "b")
    busy.streams.add("x")
    registry = EngineRegistry([busy, idle, other])
    assert registry.pick("a") is idle
    assert registry.pick("b") is other


def test_equals_take_turns() -> None:
    registry = EngineRegistry([engine(1, "a"), engine(2, "a")])
    assert {registry.pick("a").name for _ in range(2)} == {"127.0.0.1:1", "127.0.0.1:2"}


def test_a_call_that_names_no_model_goes_to_any_engine() -> None:
    assert EngineRegistry([engine(1, "a"), engine(2, "b")]).pick(None).healthy


def test_a_fleet_of_one_model_takes_any_name() -> None:
    only = engine(1, "a")
    assert EngineRegistry([only]).pick("gpt-4") is only
    assert EngineRegistry([only]).pick(None) is only


def test_with_several_models_an_unknown_name_is_an_error_that_lists_them() -> None:
    with pytest.raises(ModelNotFound, match="available: a, b"):
        EngineRegistry([engine(1, "a"), engine(2, "b")]).pick("gpt-4")


def test_a_model_whose_engines_are_down_is_not_served_by_another() -> None:
    registry = EngineRegistry([engine(1, "a", healthy=False), engine(2, "b")])
    with pytest.raises(NoEngine, match="connection refused"):
        registry.pick("a")


def test_no_engine_says_why_and_when_to_retry() -> None:
    with pytest.raises(NoEngine, match=r"now \(connection refused\)") as raised:
        EngineRegistry([engine(1, healthy=False)]).pick("a")
    assert raised.value.retry_after_s is not None
    assert "127.0.0.1" not in str(raised.value)


def test_models_are_listed_once() -> None:
    registry = EngineRegistry([engine(1, "a", "b"), engine(2, "b"), engine(3, "c", healthy=False)])
    assert [model["id"] for model in registry.models()] == ["a", "b"]


def test_those_that_were_tried_are_left_out() -> None:
    first, second = engine(1, "a"), engine(2, "a")
    registry = EngineRegistry([first, second, engine(3, "b")])
    assert {registry.pick("a", without={first}) for _ in range(3)} == {second}
    with pytest.raises(NoEngine):
        registry.pick("a", without={first, second})
