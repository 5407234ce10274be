"""The real engine's streams, cut everywhere: what leaves and what is counted does not depend on the cuts.

`tests/unit/test_sse.py` does the same to the reader alone, with every line end.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable

import pytest

from support import scenarios
from support.gateway import RunningGateway, running_gateway
from support.metered import Outcome, meter_for, outcome_of, through
from support.replay_engine import ReplayEngine
from support.transcripts import Transcript, load, streams
from support.wire import check_profile
from tokenflow_gateway.relay.dialects import DIALECTS

STREAMS = [transcript for transcript in streams() if transcript.path in DIALECTS]
OPENAI = {"/v1/chat/completions", "/v1/completions"}
KINDS = {
    "chat": "chat_stream",
    "usage": "chat_stream_usage_continuous",
    "tools": "chat_stream_tools_continuous",
    "reasoning": "chat_stream_reasoning_continuous",
    "logprobs": "chat_stream_logprobs",
    "n = 2": "chat_stream_n2_continuous",
    "JSON schema": "chat_stream_schema",
    "cut characters": "chat_stream_emoji_continuous",
    "error": "chat_stream_error",
    "abort": "chat_stream_abort",
    "completions": "completions_stream_continuous",
    "messages": "messages_stream",
    "responses": "responses_stream",
}
"""What has to be among the recordings."""
LAST_LINE = re.compile(
    rb'data: (\[DONE\]|{.*"type": *"(message_stop|response\.(completed|incomplete))".*})\n*$'
)


def metered(transcript: Transcript, reads: Iterable[bytes], *, wants_usage: bool = False) -> Outcome:
    meter = meter_for(transcript.path, wants_usage=wants_usage)
    return outcome_of(meter, through(meter, reads))


def named(transcript: Transcript) -> str:
    return transcript.name


@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS)
def test_every_kind_of_stream_is_recorded(name: str) -> None:
    assert load(name).is_stream


@pytest.mark.parametrize("transcript", STREAMS, ids=named)
def test_split_at_every_byte(transcript: Transcript) -> None:
    """Two reads that meet anywhere: the same bytes, the same counts."""
    data = transcript.data
    whole = metered(transcript, [data])
    assert whole.tokens > 0
    for at in range(1, len(data)):
        assert metered(transcript, [data[:at], data[at:]]) == whole, at


@pytest.mark.parametrize("wants_usage", [False, True], ids=["usage-cut", "usage-kept"])
@pytest.mark.parametrize("transcript", STREAMS, ids=named)
def test_reads_as_recorded_and_of_one_byte(transcript: Transcript, *, wants_usage: bool) -> None:
    data = transcript.data
    whole = metered(transcript, [data], wants_usage=wants_usage)
    assert metered(transcript, [read.data for read in transcript.reads], wants_usage=wants_usage) == whole
    assert metered(transcript, [bytes([byte]) for byte in data], wants_usage=wants_usage) == whole


@pytest.mark.parametrize("transcript", STREAMS, ids=named)
def test_cut_short_at_every_byte(transcript: Transcript) -> None:
    """An engine that is gone at any byte: never an end that did not come, never more counted than came.

    What a client gets of it is the beginning of what it gets of the whole, in whole events.
    """
    data = transcript.data
    whole = metered(transcript, [data])
    for at in range(len(data)):
        short = metered(transcript, [data[:at]])
        assert whole.data.startswith(short.data), at
        assert short.data.endswith(b"\n\n") or not short.data, at
        assert short.tokens <= whole.tokens, at
        assert not short.done or short.failed or LAST_LINE.search(data[:at]), at


def test_control_a_byte_that_is_lost_is_noticed() -> None:
    """What the tests above compare does differ where it should."""
    transcript = load("chat_stream_emoji_continuous")
    data = transcript.data
    whole = metered(transcript, [data])
    at = next(at for at, byte in enumerate(data) if byte >= 0x80)
    assert metered(transcript, [data[:at], data[at + 1 :]]) != whole


# ---- the same on sockets -----------------------------------------------------------------------------------


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.sglang()
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "id": "e", "link": "off"}) as gateway:
        yield gateway
        await gateway.everything_released()


@pytest.mark.parametrize("transcript", STREAMS, ids=named)
async def test_every_byte_a_chunk_on_the_wire(
    gateway: RunningGateway, engine: ReplayEngine, transcript: Transcript
) -> None:
    """As recorded, and byte by byte: the client gets the same, in the profile, and the same is counted."""
    engine.scripts["recorded"] = scenarios.replay(transcript)
    engine.scripts["bytewise"] = scenarios.split_at(transcript, range(len(transcript.data)))
    body = transcript.request_json()
    answers, counts, before = [], [], 0.0
    for name in ("recorded", "bytewise"):
        answer = await gateway.client.post(transcript.path, json={**body, "model": name})
        assert answer.status_code == 200
        await gateway.everything_released()  # and counted
        total = gateway.metric("tokenflow_delivered_tokens_total", engine="e")
        answers.append(answer.content)
        counts.append(total - before)
        before = total
    assert answers[0] == answers[1]
    assert counts[0] == counts[1] > 0
    if transcript.path in OPENAI:
        failed = transcript.name in {KINDS["error"], KINDS["abort"]}
        assert (check_profile(answers[0]).error is not None) == failed
