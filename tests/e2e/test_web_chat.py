"""The web example in a real browser, from a static server, against a small gateway on another origin."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from starlette.requests import Request

from support.browser import PageLog, headless_chromium, open_page
from support.chat_server import ChatServer, Served, serve_folder
from support.tabs import chromium_with_tabs
from support.transcripts import load

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "web-chat"
SHOTS = os.environ.get("TOKENFLOW_SCREENSHOTS")
HEAD, *_, FINISH, DONE = (read.data for read in load("chat_stream_scripts").reads)
WORDS = [f" word{number}" for number in range(400)]

MARK_BEACONS = """
const send = navigator.sendBeacon.bind(navigator);
navigator.sendBeacon = (url, body) => send(`${url}?beacon`, body);
"""


def beacons(server: ChatServer) -> list[Request]:
    return [request for request in server.progress_requests if request.url.query == "beacon"]


def chunk(text: str) -> bytes:
    """A recorded event with this content in it."""
    event = json.loads(HEAD.removeprefix(b"data: "))
    event["choices"][0]["delta"]["content"] = text
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def answer(*texts: str) -> list[bytes]:
    return [HEAD, *map(chunk, texts), FINISH, DONE]


@pytest.fixture(scope="module")
def site() -> Iterator[Served]:
    with serve_folder(EXAMPLE) as site:
        yield site


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def tabs(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with chromium_with_tabs(browser.browser_type, tmp_path_factory.mktemp("profile")) as tabs:
        yield tabs


@pytest.fixture
def tab(tabs: BrowserContext) -> Iterator[Page]:
    page = tabs.new_page()
    yield page
    page.close()


@pytest.fixture
def server() -> Iterator[ChatServer]:
    """A long answer, all of it there at once but for its end."""
    with ChatServer(answer(*WORDS)) as server:
        server.hold_at(len(server.parts) - 2)
        yield server


@pytest.fixture
def opened(browser: Browser, site: Served, server: ChatServer) -> Iterator[tuple[Page, PageLog]]:
    with open_page(browser, viewport={"width": 1280, "height": 800}) as (page, log):
        start(page, site, server)
        yield page, log


@pytest.fixture
def page(opened: tuple[Page, PageLog]) -> Page:
    return opened[0]


@pytest.fixture
def log(opened: tuple[Page, PageLog]) -> PageLog:
    return opened[1]


def start(page: Page, site: Served, server: ChatServer) -> None:
    page.goto(site.url)
    page.locator("summary").click()
    page.get_by_label("Base URL").fill(server.base_url)
    page.get_by_label("Base URL").blur()
    page.locator("summary").click()


def ask(page: Page, *, rate: float = 10) -> None:
    page.get_by_label("Pace").fill(str(rate))
    page.get_by_label("Question").fill("What is there to read?")
    page.keyboard.press("Enter")


def shown(page: Page) -> str:
    return page.locator(".assistant").last.text_content() or ""


def state(page: Page) -> Any:
    return expect(page.locator("#state"))


def wait_until(page: Page, condition: Callable[[], bool], *, what: str = "") -> None:
    """Lets the page run until the condition holds, for twenty seconds at most."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"the page did not come to what was waited for {what}"
        page.evaluate("() => new Promise((next) => setTimeout(next, 20))")


def let_pass(page: Page, frames: int) -> None:
    """So many frames of the screen: time in which a text that was not paused would grow."""
    page.evaluate(
        "async (frames) => { while (frames-- > 0) await new Promise(requestAnimationFrame); }", frames
    )


def shoot(page: Page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png")


def test_shows_an_answer_at_reading_pace(page: Page, log: PageLog, server: ChatServer) -> None:
    """Word by word at the slider's rate, with what waits in the bar; reports agree with the screen."""
    ask(page, rate=10)
    wait_until(page, lambda: "word5" in shown(page))
    first, first_s = len(shown(page).split()), time.monotonic()
    server.wait_for(lambda report: report["chars"] > 100)
    last, last_s = len(shown(page).split()), time.monotonic()
    assert (last - first) / (last_s - first_s) == pytest.approx(10, rel=0.25)
    assert shown(page) == "".join(WORDS)[: len(shown(page))]
    state(page).to_have_text("reading")
    expect(page.locator("#ahead-text")).to_contain_text("tokens ahead")
    assert int(page.get_by_role("meter").get_attribute("aria-valuenow") or 0) > 300
    assert all(report["rate"] == 10 and report["visible"] for report in server.reports)
    assert server.streams[0].headers["x-tokenflow-rate"] == "10"
    assert server.streams[0].request["model"] == "smollm2-135m"
    assert log.errors == []


def test_pause_stops_the_text_and_tells_the_gateway(page: Page, log: PageLog, server: ChatServer) -> None:
    """A paused report at once, with exactly what is on the screen; nothing moves; then it goes on."""
    ask(page, rate=20)
    wait_until(page, lambda: "word5" in shown(page))
    page.get_by_role("button", name="Pause").click()
    paused = server.wait_for(lambda report: report["paused"])
    text = shown(page)
    assert paused["chars"] == len(text)
    state(page).to_have_text("paused")
    let_pass(page, 60)
    assert shown(page) == text

    page.get_by_role("button", name="Resume").click()
    resumed = server.wait_for(lambda report: not report["paused"] and report["seq"] > paused["seq"])
    assert len(text) <= resumed["chars"] <= len(text) + 20
    wait_until(page, lambda: len(shown(page)) > len(text) + 30)
    let_pass(page, 10)  # the control: frames do move a text that is not paused
    assert len(shown(page)) > len(text) + 30
    assert log.errors == []


def test_a_hidden_page_is_reported_and_shows_nothing(
    tabs: BrowserContext, tab: Page, site: Served, server: ChatServer
) -> None:
    """Another tab in front: reported at once, the text stands still; back again, it goes on at its pace."""
    log = PageLog(tab)
    start(tab, site, server)
    ask(tab, rate=20)
    wait_until(tab, lambda: "word5" in shown(tab))
    other = tabs.new_page()
    other.bring_to_front()
    hidden = server.wait_for(lambda report: not report["visible"])
    text = shown(tab)
    assert hidden["chars"] == len(text)
    assert not hidden["paused"]
    state(tab).to_have_text("hidden")
    let_pass(other, 60)
    assert shown(tab) == text

    other.close()
    tab.bring_to_front()
    back = server.wait_for(lambda report: report["visible"] and report["seq"] > hidden["seq"])
    assert back["chars"] <= len(text) + 20, "did not jump to the end"
    wait_until(tab, lambda: len(shown(tab)) > len(text) + 30)
    state(tab).to_have_text("reading")
    assert log.errors == []


def test_a_page_that_goes_away_says_so(tab: Page, site: Served, server: ChatServer) -> None:
    """The last report comes from a page that is gone, by `sendBeacon`."""
    tab.add_init_script(MARK_BEACONS)
    start(tab, site, server)
    ask(tab, rate=20)
    wait_until(tab, lambda: "word5" in shown(tab))
    assert not beacons(server)
    tab.goto("about:blank")
    server.wait_until(lambda: bool(beacons(server)))


def test_scrolling_back_is_a_pause(page: Page, log: PageLog, server: ChatServer) -> None:
    """Up in the text: paused; down at its end: reading."""
    ask(page, rate=30)
    page.set_viewport_size({"width": 390, "height": 400})
    conversation = page.locator("#log")
    wait_until(page, lambda: conversation.evaluate("(log) => log.scrollTop") > 150)
    conversation.hover()
    page.mouse.wheel(0, -120)
    state(page).to_have_text("paused")
    paused = server.wait_for(lambda report: report["paused"])
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    page.mouse.wheel(0, 1000)
    state(page).to_have_text("reading")
    server.wait_for(lambda report: not report["paused"] and report["seq"] > paused["seq"])
    assert log.errors == []


def test_whole_answer_and_a_second_question(page: Page, log: PageLog, server: ChatServer) -> None:
    """The text is complete to the last word; the next question carries the conversation."""
    server.parts = answer("Hello", ", wor", "ld! ", "你好。", "世界", "🌍", " The", " end")
    server.release()
    ask(page, rate=30)
    state(page).to_have_text("all read")
    assert shown(page) == "Hello, world! 你好。世界🌍 The end"
    page.get_by_label("Question").fill("And then?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".assistant")).to_have_count(2)
    state(page).to_have_text("all read")
    assert [message["role"] for message in server.streams[1].request["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    assert server.streams[1].request["messages"][1]["content"] == "Hello, world! 你好。世界🌍 The end"
    assert log.not_about_loading() == []


def test_a_complete_answer_is_reported_until_it_is_read(page: Page, log: PageLog, server: ChatServer) -> None:
    """All text is there at once; reports go on at the reader's pace. The reader has the same name twice."""
    server.parts = answer(*WORDS[:60])
    server.release()
    ask(page, rate=20)
    server.wait_until(lambda: any(not stream.open for stream in server.streams))
    assert len(shown(page)) < len("".join(WORDS[:60]))
    server.wait_for(lambda report: report["chars"] == len("".join(WORDS[:60])))
    state(page).to_have_text("all read")
    after = [report for report in server.reports if not report["open"]]
    assert len(after) >= 3
    told = len(server.reports)

    ask(page, rate=20)
    server.wait_for(lambda report: report["chars"] > 20 and not report["open"], after=told)
    page.get_by_role("button", name="Stop").click()
    state(page).to_have_text("stopped")
    text = shown(page)
    server.wait_until(lambda: server.reports[-1]["chars"] == len(text))
    told = len(server.reports)
    let_pass(page, 150)
    assert len(server.reports) == told, "nothing more of a reader who has left"
    first, second = (stream.request["user"] for stream in server.streams)
    assert first == second
    assert len(first) == 24
    assert log.errors == []


def test_stop_ends_the_stream(page: Page, log: PageLog, server: ChatServer) -> None:
    """The gateway sees the reader leave, the text stays, and the page is ready for the next question."""
    ask(page)
    wait_until(page, lambda: "word5" in shown(page))
    page.get_by_role("button", name="Stop").click()
    server.wait_until(lambda: not server.streams[0].open)
    state(page).to_have_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert "word5" in shown(page)
    assert log.errors == []


def test_says_what_went_wrong(page: Page, log: PageLog, server: ChatServer) -> None:
    """The server's own words for a refusal and an error in the stream; the address where nobody answers."""
    alert = page.get_by_role("alert").last
    server.refuses_with = 503
    ask(page)
    expect(alert).to_have_text("no engine serves this model")
    server.refuses_with = None
    server.parts = [HEAD, chunk("Begun "), b'data: {"error":{"message":"the engine was lost"}}\n\n', DONE]
    ask(page, rate=30)
    expect(alert).to_have_text("the engine was lost")
    assert shown(page) == "Begun "
    page.locator("summary").click()
    page.get_by_label("Base URL").fill("http://127.0.0.1:1/v1")
    page.locator("summary").click()
    ask(page)
    expect(alert).to_contain_text("http://127.0.0.1:1/v1 cannot be reached: is it running")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert log.not_about_loading() == []


def test_text_of_a_model_is_only_text(page: Page, log: PageLog, server: ChatServer) -> None:
    hostile = "<img src=x onerror=\"document.title='owned'\">"
    server.parts = answer(hostile, " end")
    server.release()
    ask(page, rate=30)
    wait_until(page, lambda: shown(page) == f"{hostile} end")
    expect(page.locator("main img")).to_have_count(0)
    expect(page).to_have_title("TokenFlow chat")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_fits_every_screen(
    browser: Browser, site: Served, server: ChatServer, width: int, scheme: Any
) -> None:
    """No scrolling sideways, everything in reach, with and without an answer, in both colour schemes."""
    viewport: Any = {"width": width, "height": 780}
    with open_page(browser, viewport=viewport, color_scheme=scheme) as (page, log):
        start(page, site, server)
        shoot(page, f"{width}-{scheme}-empty")
        ask(page, rate=30)
        wait_until(page, lambda: "word60" in shown(page))
        for name in ("Pause", "Stop"):
            expect(page.get_by_role("button", name=name)).to_be_in_viewport(ratio=1)
        page.get_by_role("button", name="Pause").click()
        state(page).to_have_text("paused")
        shoot(page, f"{width}-{scheme}-paused")
        assert page.evaluate("() => document.documentElement.scrollWidth") == width
        page.locator("summary").click()
        expect(page.get_by_label("API key")).to_be_in_viewport(ratio=1)
        shoot(page, f"{width}-{scheme}-settings")
        assert log.errors == []
