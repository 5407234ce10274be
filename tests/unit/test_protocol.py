"""The contract of the link: what both sides can rely on."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_engine import protocol
from tokenflow_engine.protocol import (
    Aborted,
    Consumption,
    EngineStats,
    Hello,
    Ping,
    ProtocolError,
    Reading,
    Refused,
    StreamClosed,
    StreamOpened,
    StreamState,
    StreamStates,
    Welcome,
    decode_engine_messages,
    decode_gateway_messages,
    encode,
)

FROM_GATEWAY = [
    Hello(version=1, gateway_id="g", incarnation="i", secret="s"),
    Ping(),
    StreamOpened(rid="r", at=1.5, tenant="t", sla="gold", reader="voice", declared_rate=4.0),
    Consumption(
        readings=[Reading(rid="r", at=1.0, consumed=3.5, rate=5, rate_low=4, rate_high=6, paused=True)]
    ),
    StreamClosed(rid="r", reason="client_gone"),
]
FROM_ENGINE = [
    Welcome(
        version=1,
        engine_id="e",
        model="m",
        engine="sglang 0.5.23",
        capabilities=["count"],
        kv_tokens=1,
        max_running=2,
    ),
    Refused(code="bad_secret", reason="why"),
    StreamStates(at=1.0, states=[StreamState(rid="r", state="running", generated=3)]),
    EngineStats(
        at=1.0,
        running=1,
        waiting=2,
        parked=0,
        kv_used_tokens=3,
        kv_tokens=4,
        tokens_per_s=5.0,
        generated_total=6,
        hook_errors=7,
    ),
    Aborted(rid="r", generated=3, was_live=True),
]


@pytest.mark.parametrize("message", FROM_GATEWAY, ids=lambda m: type(m).__name__)
def test_a_gateways_message_survives_the_wire(message: protocol.GatewayMessage) -> None:
    assert decode_gateway_messages(encode([message])) == [message]


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_an_engines_message_survives_the_wire(message: protocol.EngineMessage) -> None:
    assert decode_engine_messages(encode([message])) == [message]


def test_several_messages_share_a_frame_and_one_alone_is_as_it_was_in_version_1() -> None:
    assert decode_gateway_messages(encode(FROM_GATEWAY)) == FROM_GATEWAY
    assert decode_engine_messages(encode(FROM_ENGINE)) == FROM_ENGINE
    hello = msgspec.msgpack.decode(encode(FROM_GATEWAY[:1]))
    assert (hello["type"], hello["version"]) == ("Hello", 1)


def test_the_two_directions_are_not_mixed_up() -> None:
    with pytest.raises(ProtocolError):
        decode_engine_messages(encode([Ping()]))
    with pytest.raises(ProtocolError):
        decode_gateway_messages(encode(FROM_ENGINE[-1:]))


def test_unknown_fields_of_a_newer_release_are_ignored() -> None:
    frame = msgspec.msgpack.encode({"type": "StreamClosed", "rid": "r", "reason": "x", "mood": "good"})
    assert decode_gateway_messages(frame) == [StreamClosed(rid="r", reason="x")]


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_with_one_kind_of_error(frame: bytes) -> None:
    for decode in (decode_gateway_messages, decode_engine_messages):
        with contextlib.suppress(ProtocolError):
            decode(frame)


def test_everything_public_is_declared() -> None:
    assert all(hasattr(protocol, name) for name in protocol.__all__)


ANY_NUMBER = st.floats() | st.sampled_from([0.0, -1.0, 1e300, 5.3])
SECONDS, TOKENS = (0.0, 1e11), (0.0, 1e9)


def is_within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


@given(st.tuples(*[ANY_NUMBER] * 5), st.booleans())
def test_a_reading_has_numbers_that_a_reader_can_have(numbers: tuple[float, ...], paused: bool) -> None:
    names = ("at", "consumed", "rate", "rate_low", "rate_high")
    raw = {"rid": "r", "paused": paused, **dict(zip(names, numbers, strict=True))}
    (message,) = decode_gateway_messages(msgspec.msgpack.encode({"type": "Consumption", "readings": [raw]}))
    assert isinstance(message, Consumption)
    (reading,) = message.readings
    assert 0.01 <= reading.rate_low <= reading.rate <= reading.rate_high <= 10_000
    assert is_within(reading.consumed, TOKENS)
    assert is_within(reading.at, SECONDS)
    assert decode_gateway_messages(encode([message])) == [message]


@given(st.tuples(*[ANY_NUMBER] * 4))
def test_an_opened_stream_has_numbers_to_divide_by(numbers: tuple[float, ...]) -> None:
    names = ("at", "declared_rate", "weight", "ttft_s")
    raw = {"type": "StreamOpened", "rid": "r", **dict(zip(names, numbers, strict=True))}
    (opened,) = decode_gateway_messages(msgspec.msgpack.encode(raw))
    assert isinstance(opened, StreamOpened)
    assert opened.declared_rate is None or is_within(opened.declared_rate, (0.01, 10_000))
    assert is_within(opened.weight, (0.001, 1000))
    assert is_within(opened.ttft_s, (0.001, 3600))
    assert is_within(opened.at, SECONDS)


def test_numbers_that_can_be_are_left_as_they_are() -> None:
    reading = Reading(rid="r", at=1e9, consumed=0.0, rate=5.0, rate_low=0.05, rate_high=1000.0)
    opened = StreamOpened(rid="r", at=1e9, declared_rate=0.05, weight=0.5, ttft_s=30.0)
    assert msgspec.to_builtins(reading) == {
        "rid": "r", "at": 1e9, "consumed": 0.0, "rate": 5.0, "rate_low": 0.05, "rate_high": 1000.0,
    }  # fmt: skip
    assert (opened.declared_rate, opened.weight, opened.ttft_s) == (0.05, 0.5, 30.0)
