"""The same clients on bytes that the gateway never sends: the checks tell, and show why it does not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio

from compat.cases import Record
from compat.clients import CLIENTS, ClientProcess, Outcome
from compat.features import feature
from support.replay_engine import ReplayEngine, Script
from support.scenarios import raw
from support.transcripts import load

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

TABLE = "bare"
FIRST, *REST = (read.data for read in load("chat_stream").reads)
PYTHON = {"openai-python 1", "openai-python 3", "LangChain Python"}
AI_SDK = {"AI SDK 6", "AI SDK 7"}
OPEN_WEBUI = {"Open WebUI server", "Open WebUI page"}
EVERYBODY = {client.name for client in CLIENTS}


@dataclass(frozen=True, kw_only=True)
class Control:
    """Bytes for the client, the check of a `feature`, and the clients that do not pass it."""

    name: str
    title: str
    answer: Callable[[], Script]
    feature: str
    harmed: set[str]


def with_first(part: bytes) -> Callable[[], Script]:
    return lambda: raw([FIRST, part, *REST])


def with_last(part: bytes) -> Callable[[], Script]:
    return lambda: raw([FIRST, *REST, part])


CONTROLS = (
    Control(
        name="empty",
        title="an empty `data:` event",
        answer=with_first(b"data: \n\n"),
        feature="stream",
        harmed=EVERYBODY - OPEN_WEBUI,
    ),
    Control(
        name="id-ping",
        title="`id:` on an event, later `: ping`",
        answer=lambda: raw([FIRST.replace(b"data:", b"id: 1\ndata:", 1), b": ping\n\n", *REST]),
        feature="stream",
        harmed=PYTHON,
    ),
    Control(
        name="retry",
        title="a lone `retry:`",
        answer=with_first(b"retry: 1000\n\n"),
        feature="stream",
        harmed=PYTHON,
    ),
    Control(
        name="other-event",
        title="an event of another kind",
        answer=with_first(b'event: tokenflow\ndata: {"tokenflow":{}}\n\n'),
        feature="stream",
        harmed=AI_SDK,
    ),
    Control(
        name="done-twice",
        title="`[DONE]` twice",
        answer=with_last(b"data: [DONE]\n\n"),
        feature="stream",
        harmed=set(),
    ),
    Control(
        name="truncated",
        title="no `[DONE]`: half an answer",
        answer=feature("truncated").answer,
        feature="truncated",
        harmed=EVERYBODY,
    ),
    Control(
        name="flat-error",
        title="the engine's flat error in the stream",
        answer=feature("flat-error").answer,
        feature="flat-error",
        harmed=EVERYBODY - AI_SDK,
    ),
)


def seen(outcome: Outcome) -> str:
    """What the user gets to see, in a word or two."""
    if outcome.error is not None:
        return f"raises {outcome.error['type']}"
    return "whole answer" if outcome.finish_reasons else "half an answer, no error"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[ReplayEngine]:
    async with ReplayEngine({control.name: control.answer() for control in CONTROLS}) as engine:
        yield engine


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
async def test_control(client: ClientProcess, control: Control, engine: ReplayEngine, record: Record) -> None:
    asked = feature(control.feature)
    outcome = await client.ask(f"{engine.base_url}/v1", asked.request(control.name))
    record(client, control.title, TABLE, seen(outcome))
    if client.name in control.harmed:
        with pytest.raises(AssertionError):
            asked.check(outcome)
    else:
        asked.check(outcome)
