"""What the launcher and the plugin make of SGLang's processes: where they listen, how they die together."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from support.completions import StreamedRequest, complete, new_rid
from support.engine_processes import is_running, listening_addresses, processes, the_process
from support.raw_link import RawLink
from support.real_engine import RealEngine, wait_until
from tokenflow_engine.protocol import Welcome

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHAT = "/v1/chat/completions"
ENDLESS = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "ignore_eos": True}
LOOPBACK = {
    "0100007F",  # 127.0.0.1
    "00000000000000000000000001000000",  # ::1
    "0000000000000000FFFF00000100007F",  # ::ffff:127.0.0.1
}


def test_the_engine_listens_on_loopback_only(tiny_engine: RealEngine):
    found = listening_addresses(tiny_engine)
    assert found
    assert found <= LOOPBACK


def test_responses_are_answered_and_streamed(tiny_engine: RealEngine):
    """The route needs a package of its own, which the engine imports on the first request."""
    with urllib.request.urlopen(f"{tiny_engine.base_url}/v1/models") as models:  # noqa: S310
        name = json.load(models)["data"][0]["id"]
    body = {"model": name, "input": "hello", "max_output_tokens": 8, "temperature": 0}

    def post(more: dict[str, Any]) -> str:
        data = json.dumps(body | more).encode()
        url = f"{tiny_engine.base_url}/v1/responses"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return str(answer.read().decode())

    assert json.loads(post({}))["object"] == "response"
    streamed = post({"stream": True})
    assert "event: response.output_text.delta" in streamed
    assert "event: response.incomplete" in streamed  # cut off by `max_output_tokens`


def test_a_second_engine_leaves_the_link_to_the_first_and_serves_without_one(
    tiny_engine: RealEngine, new_engine: Callable[..., RealEngine]
):
    with new_engine(env={"TOKENFLOW_LINK": tiny_engine.link}) as second:
        assert f"serves as without the plugin: another engine listens at {tiny_engine.link}" in second.log()
        assert complete(second.base_url, CHAT, ENDLESS | {"max_tokens": 9}) == 9
    with RawLink(tiny_engine.link, secret=tiny_engine.secret, gateway_id=new_rid()) as link:
        assert isinstance(link.hello(), Welcome)


@pytest.mark.parametrize("part", ["scheduler", "detokenizer"])
def test_when_one_process_dies_the_whole_engine_ends_within_two_seconds(
    new_engine: Callable[..., RealEngine], part: str
):
    with new_engine() as engine:
        family = processes(engine)
        assert len(family) >= 3
        victim = the_process(engine, part)
        with StreamedRequest(engine.base_url, CHAT, ENDLESS | {"rid": new_rid()}) as request:
            next(request.events())
            killed_at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: not engine.is_alive(), timeout_s=10.0, what="the engine ends")
            assert time.monotonic() - killed_at < 2.0
        wait_until(lambda: not any(map(is_running, family)), timeout_s=2.0, what="nothing is left")
