"""A policy as it is spelled: its name, its options, and parts of the plugin that are switched off."""

from __future__ import annotations

import math

import msgspec
import pytest

from tokenflow_engine.control.orders import Orders
from tokenflow_engine.control.parts import ALL_PARTS, Parts
from tokenflow_engine.policy.spelling import spelled
from tokenflow_engine.sglang import policies


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("adaptive", "adaptive", {}),
        ("adaptive:", "adaptive", {}),
        ("adaptive:write_s=0", "adaptive", {"write_s": 0}),
        ("adaptive:most=8, share=0.5", "adaptive", {"most": 8, "share": 0.5}),
        ("andes:lead_cap_s=inf", "andes", {"lead_cap_s": math.inf}),
    ],
)
def test_name_and_options(text: str, name: str, options: dict[str, float]) -> None:
    assert spelled(text) == (name, options)


def test_whole_numbers_stay_whole() -> None:
    _, options = spelled("adaptive:most=8,share=8.0")
    assert [type(value) for value in options.values()] == [int, float]


@pytest.mark.parametrize("text", ["adaptive:write_s", "adaptive:write_s=much", "adaptive:=1=2"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an option and its value, such as write_s=0\.5"):
        spelled(text)


def test_a_policy_is_called_as_it_was_spelled() -> None:
    policy, parts = policies.named("adaptive:offload=0,write_s=0.25,pauses=1")
    assert policy.name == "adaptive:offload=0,write_s=0.25,pauses=1"
    assert parts == Parts(offload=False)
    assert policies.named("adaptive")[0].name == "adaptive"
    assert policies.named("fcfs")[1] == ALL_PARTS


@pytest.mark.parametrize("text", ["adaptive:magic=1", "fifo", "fcfs:write_s=0", "chaos:write_s=0"])
def test_what_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="polic"):
        policies.named(text)


def test_parts_go_to_all_ranks_with_the_orders() -> None:
    parts = Parts(overlap=False, write_through=False)
    packed = msgspec.msgpack.encode(Orders(park=["a"], parts=parts))
    assert msgspec.msgpack.decode(packed, type=Orders).parts == parts
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Orders()), type=Orders).parts == ALL_PARTS
