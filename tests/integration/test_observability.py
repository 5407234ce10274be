"""Dashboard, alerts and docs name metrics that a running gateway has."""

from __future__ import annotations

import asyncio
import re
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from typing import Any

import promql_parser
import pytest

from support import scenarios
from support.deployment import dashboard, queries
from support.gateway import RunningGateway, eventually, running_gateway
from support.metrics_page import PAGE, page_with_table
from support.plugin_stand_in import PluginStandIn
from support.replay_engine import ReplayEngine

CHAT = "/v1/chat/completions"
_OF_PROMETHEUS = {"up"}


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    """With an engine whose plugin is linked, after a stream."""
    scripts = scenarios.sglang("chat_stream_usage")
    async with ReplayEngine(scripts) as engine:
        with PluginStandIn(engine.base_url):
            async with running_gateway({"url": engine.base_url, "id": "e"}) as gateway:
                (known,) = gateway.app.registry
                await eventually(lambda: known.linked and known.stats is not None, "the plugin is linked")
                body = {"model": "chat_stream_usage", "stream": True, "messages": []}
                assert (await gateway.client.post(CHAT, json=body)).status_code == 200
                await gateway.everything_released()
                yield gateway


async def exposition(gateway: RunningGateway) -> str:
    return (await gateway.client.get("/metrics")).text


def names_in(text: str) -> set[str]:
    """Names of all series that an exposition can have, those without a sample yet included."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        found |= {name + part for part in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return found


def selectors(expression: Any) -> Iterator[str]:
    """Names of the metrics in a parsed query."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression.name
    for part in ("expr", "lhs", "rhs", "param", "vector_selector"):
        if (inner := getattr(expression, part, None)) is not None:
            yield from selectors(inner)
    for argument in getattr(expression, "args", None) or ():
        yield from selectors(argument)


async def test_every_query_asks_for_what_there_is(gateway: RunningGateway) -> None:
    there = names_in(await exposition(gateway)) | _OF_PROMETHEUS
    for where, query in queries():
        asked = set(selectors(promql_parser.parse(query)))
        assert asked, where
        assert asked <= there, f"{where}: {asked - there}"
    (variable,) = [v for v in dashboard()["templating"]["list"] if v["type"] == "query"]
    assert re.fullmatch(r"label_values\((\w+), engine\)", variable["query"]["query"])[1] in there  # type: ignore[index]


def test_control_the_names_of_a_query_are_found() -> None:
    query = (
        "histogram_quantile(0.9, sum by (le) (rate(a_bucket[5m]))) / (b > 0) or max_over_time(c[1h:1m]) - -d"
    )
    assert set(selectors(promql_parser.parse(query))) == {"a_bucket", "b", "c", "d"}


async def test_a_stream_is_in_the_metrics_of_the_field(gateway: RunningGateway) -> None:
    for name in (
        "tokenflow_time_to_first_token_seconds_count",
        "tokenflow_time_per_output_token_seconds_count",
        "tokenflow_request_seconds_count",
    ):
        assert gateway.metric(name, engine="e") == 1, name
    assert (
        0
        < gateway.metric("tokenflow_effective_tokens_total", engine="e")
        <= gateway.metric("tokenflow_generated_tokens_total", engine="e")
    )


async def test_slack_counts_open_streams_by_what_they_have_left(gateway: RunningGateway) -> None:
    """A cumulative histogram of the moment: no stream is left, so all are zero."""
    text = await exposition(gateway)
    assert re.findall(r'^tokenflow_readers_with_slack\{le="(\S+)"\} (\S+)$', text, re.MULTILINE) == [
        (bound, "0.0") for bound in ("0", "0.5", "1", "2", "5", "10", "30", "+Inf")
    ]


def test_the_page_has_every_metric_as_it_is() -> None:
    """Otherwise: ``PYTHONPATH=tests python -m support.metrics_page``."""
    page = PAGE.read_text()
    assert page == page_with_table(page)


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)
async def test_promtool_can_read_the_exposition(gateway: RunningGateway) -> None:
    """Its advice on names is not followed everywhere; what it cannot parse is an error."""
    text = await exposition(gateway)
    process = await asyncio.create_subprocess_exec("promtool", "check", "metrics", stdin=PIPE, stderr=PIPE)
    _, said = await process.communicate(text.encode())
    assert b"error while linting" not in said, said
    assert process.returncode in {0, 3}, said
