"""The main job as a newcomer sees it: `tokenflow up`, then real clients with only their base URL changed."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from compat.clients import ClientProcess, client
from support.browser import headless_chromium, open_page
from support.curl import curl
from support.up import END_S, Run, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Nothing of it survives when it is killed."""
    run = Run(tmp_path_factory.mktemp("up"))
    try:
        run.wait_until_ready()
        yield run
        assert len(run.alive()) >= 7, "up, two wardens, gateway, the engine's three, or this shows nothing"
        assert any("scheduler" in line for line in run.alive())
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not run.alive(), timeout_s=END_S, what="nothing of it is left")
    finally:
        run.kill_rest()


@pytest.fixture
def base_url(up: Run) -> str:
    return f"http://127.0.0.1:{up.port}/v1"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
@pytest.mark.parametrize("name", ["openai-python 3", "openai-node 7"], ids=["python", "node"])
def test_openai_clients_get_paris(base_url: str, name: str, *, stream: bool) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    with ClientProcess(client(name)) as process:
        answer = asyncio.run(
            process.ask(base_url, {"model": MODEL, "messages": [question], "stream": stream})
        )
    assert answer.error is None
    assert "Paris" in answer.text
    assert answer.finish_reasons == ["stop"]
    assert answer.chunks > 5 if stream else answer.chunks == 1


def test_curl_sees_the_events_one_by_one(base_url: str) -> None:
    """A decode step of this model takes tens of milliseconds: held-back events would come in one burst."""

    async def arrivals() -> list[float]:
        async with curl(base_url, MODEL, max_tokens=40, ignore_eos=True) as running:
            return [at_s async for at_s, _ in running.events()]

    times = asyncio.run(arrivals())
    assert len(times) > 30
    assert sum(later - earlier > 0.005 for earlier, later in pairwise(times)) > 25


@contextmanager
def reader(base_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody who reads a long answer with curl, and leaves at the end of the block."""
    body = {"model": MODEL, "stream": True, "max_tokens": 2000, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "Tell me a story."}]
    command = ["curl", "-sN", f"{base_url}/chat/completions", "-H", "Content-Type: application/json"]
    with subprocess.Popen([*command, "-d", json.dumps(body)], stdout=subprocess.DEVNULL) as process:
        yield process
        process.kill()


def test_the_dashboard_shows_the_engine_and_a_live_stream(up: Run, base_url: str) -> None:
    with headless_chromium() as browser, open_page(browser) as (page, log), reader(base_url):
        page.goto(f"http://127.0.0.1:{up.port}/dashboard")
        card = page.locator("#engines > *")
        expect(card).to_contain_text("sglang 0.5.23", timeout=15_000)
        expect(card).to_contain_text("linked")
        row = page.locator("#streams > tr")
        expect(row).to_contain_text("running", timeout=15_000)
        generated = row.locator('[data-field="generated"]')
        before = generated.inner_text()
        expect(generated).not_to_have_text(before)
        assert log.errors == []


def test_a_reader_that_leaves_is_gone_from_the_dashboard(up: Run, base_url: str) -> None:
    with headless_chromium() as browser, open_page(browser) as (page, _):
        page.goto(f"http://127.0.0.1:{up.port}/dashboard")
        with reader(base_url):
            expect(page.locator("#streams > tr")).to_have_count(1, timeout=15_000)
        expect(page.locator("#no-streams")).to_be_visible()
