"""The dashboard in a real browser, against a small server whose admin answers each test controls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from support.admin_server import AdminServer, engine, stream, unlinked
from support.browser import PageLog, headless_chromium, open_page

pytestmark = pytest.mark.e2e

MODEL = "SmolLM2-135M-Instruct"
UNKNOWN = "\N{EN DASH}"
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_chromium() as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[AdminServer]:
    server = AdminServer()
    yield server
    server.stop()


@pytest.fixture
def opened(browser: Browser, server: AdminServer) -> Iterator[tuple[Page, PageLog]]:
    with open_page(browser, viewport={"width": 1280, "height": 800}) as (page, log):
        page.goto(f"{server.url}/dashboard")
        yield page, log


@pytest.fixture
def page(opened: tuple[Page, PageLog]) -> Page:
    return opened[0]


@pytest.fixture
def log(opened: tuple[Page, PageLog]) -> PageLog:
    return opened[1]


def cell(within: Locator, name: str) -> Locator:
    return within.locator(f'[data-field="{name}"]')


def connection(page: Page) -> Locator:
    return page.get_by_role("status")


def wait_until(page: Page, condition: Callable[[], bool]) -> None:
    """Lets the page run until the condition holds, for ten seconds at most."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the page did not come to what was waited for"
        page.evaluate("() => new Promise(requestAnimationFrame)")


def test_shows_engines_and_streams(page: Page, log: PageLog, server: AdminServer) -> None:
    """Every value of both answers is on the page, and nothing was fetched from anywhere else."""
    expect(connection(page)).to_have_text("live")
    expect(page.locator(".totals dd")).to_have_text(["1 of 1", "1", "1", "2", "1", "0", "85.2"])

    card = page.locator(".engine")
    for name, text in {
        "id": "engine-1",
        "running": "3",
        "waiting": "1",
        "parked": "2",
        "offloaded": "1",
        "streams": "6",
        "policy": "policy adaptive",
    }.items():
        expect(cell(card, name)).to_have_text(text)
    expect(cell(card, "about")).to_have_text("sglang 0.5.23 · SmolLM2-135M-Instruct")
    expect(cell(card, "kv-text")).to_have_text("10,000 / 40,000 (25%)")
    expect(card.get_by_role("meter")).to_have_attribute("aria-valuenow", "10000")
    expect(cell(card, "kv-bar").locator("i")).to_have_attribute("style", "width: 25%;")

    row = page.get_by_role("row").nth(1)
    expect(row.get_by_role("rowheader")).to_have_text("tf-0001c0ff…")
    expect(row.get_by_role("rowheader")).to_have_attribute("title", "tf-0001c0ffee5ca1ab1e")
    counts = ["8", "1.5 s", "5.3", "120", "112", "112"]
    expect(row.get_by_role("cell")).to_have_text(
        ["running", "reading", *counts, "3.2 s", "210 ms", "anonymous", "default", MODEL, "engine-1"]
    )
    expect(cell(row, "rate")).to_have_attribute("title", "3.9 to 6.7")
    expect(cell(row, "unread-bar").locator("i")).to_have_attribute("style", "width: 50%;")

    assert log.errors == []
    assert all(url.startswith(server.url) for url in log.requested)


def test_updates_in_place(page: Page, log: PageLog, server: AdminServer) -> None:
    """New values arrive without a reload, in the very same elements; rows come, go and stay in order."""
    server.streams = [stream(1), stream(2), stream(3)]
    rows = page.locator("#streams tr")
    expect(rows).to_have_count(3)
    page.evaluate("() => { document.querySelectorAll('#streams tr')[1].marked = true; }")

    server.streams = [stream(2, state="parked", generated=1500, buffered=100.2), stream(3), stream(4)]
    server.engines = [engine(running=1, tokens_per_s=140.4)]

    expect(cell(rows.first, "state")).to_have_text("parked")
    expect(cell(rows.first, "unread")).to_have_text("100")
    expect(cell(rows.first, "generated")).to_have_text("1,500")
    expect(rows.locator("th")).to_have_text(["tf-0002c0ff…", "tf-0003c0ff…", "tf-0004c0ff…"])
    expect(cell(page.locator(".engine"), "running")).to_have_text("1")
    expect(page.locator("#total-rate")).to_have_text("140")
    assert page.evaluate("() => document.querySelector('#streams tr').marked") is True
    assert log.errors == []


def test_what_is_not_known_is_no_zero(page: Page, log: PageLog, server: AdminServer) -> None:
    """An engine without a link shows dashes and the reason, in words; its streams and health are known."""
    server.engines = [unlinked("engine-2", streams=0)]
    server.streams = [stream(state="unknown", generated=None, buffered=None, ttft_s=None)]
    card = page.locator(".engine")
    expect(cell(card, "linked")).to_have_text("not linked")
    expect(cell(card, "healthy")).to_have_text("healthy")
    expect(cell(card, "reason")).to_have_text("the plugin has not answered yet")
    for name in ("running", "waiting", "parked", "offloaded", "kv-text", "rate"):
        expect(cell(card, name)).to_have_text(UNKNOWN)
    expect(cell(card, "streams")).to_have_text("0")
    expect(card.get_by_role("meter")).to_have_attribute("aria-valuetext", "not known")
    expect(page.locator(".totals dd")).to_have_text(["0 of 1", "1", *[UNKNOWN] * 3, "0", UNKNOWN])

    row = page.locator("#streams tr")
    for name in ("generated", "unread", "slack", "ttft"):
        expect(cell(row, name)).to_have_text(UNKNOWN)
    assert log.errors == []


def test_says_what_is_parked_or_offloaded_and_why(page: Page, log: PageLog, server: AdminServer) -> None:
    server.streams = [
        stream(1, state="parked", reason="ahead"),
        stream(2, state="parked", reason="no_room", offloaded=True),
        stream(3, state="waiting", reason="overload", buffered=0.0, reader_state="stalled"),
        stream(4, buffered=2.0, rate=4.0),
        stream(5, reader_state="paused", reason="something_new"),
    ]
    rows = page.locator("#streams tr")
    expect(rows).to_have_count(5)
    places = ["parked", "offloaded", "waiting", "running", "running"]
    expect(cell(rows, "state")).to_have_text(places)
    expect(cell(rows, "why")).to_have_text(
        ["reader is ahead", "no room", "overload: a class of more weight goes first", "", "something_new"]
    )
    expect(cell(rows, "slack")).to_have_text(["1.5 s", "1.5 s", "0.0 s", "0.5 s", UNKNOWN])
    kinds = [cell(rows.nth(number), "unread-bar").get_attribute("data-kind") for number in range(5)]
    assert kinds == ["parked", "offloaded", "waiting", "low", "running"]
    expect(page.locator("#total-stalled")).to_have_text("1")
    assert log.errors == []


def test_tells_tenants_and_classes_apart(page: Page, log: PageLog, server: AdminServer) -> None:
    """As soon as there are any; the least slack is that of the reader who will wait first."""
    expect(connection(page)).to_have_text("live")
    section = page.locator("#groups-section")
    expect(section).to_be_hidden()
    server.streams = [
        stream(1, tenant="acme", sla="gold"),
        stream(2, tenant="acme", sla="gold", state="parked", buffered=53.0),
        stream(3, tenant="acme", sla="bronze", state="waiting", buffered=0.0, reader_state="stalled"),
        stream(4, tenant=HOSTILE, sla="gold", state="parked", offloaded=True, reader_state="paused"),
    ]
    rows = section.locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(2).locator("th, td")).to_have_text(
        ["acme", "gold", "2", "1", "0", "1", "0", "0", "1.5 s"]
    )
    expect(rows.nth(1).locator("th, td")).to_have_text(
        ["acme", "bronze", "1", "0", "1", "0", "0", "1", "0.0 s"]
    )
    expect(rows.nth(0).locator("th, td")).to_have_text(
        [HOSTILE, "gold", "1", "0", "0", "0", "1", "0", UNKNOWN]
    )
    assert log.errors == []


def test_sparkline_has_a_gap_where_nothing_was_known(page: Page, server: AdminServer) -> None:
    """The line of the last minute grows, breaks while the link is down and goes on after it."""
    stroke = page.locator(".sparkline .stroke")

    def drawn(pattern: str) -> Callable[[], bool]:
        return lambda: page.evaluate(
            "([d, p]) => new RegExp(p).test(d)", [stroke.get_attribute("d"), pattern]
        )

    wait_until(page, drawn(r"^M[^M]*L[^M]*$"))
    server.engines = [unlinked("engine-1")]
    expect(cell(page.locator(".engine"), "rate")).to_have_text(UNKNOWN)
    server.engines = [engine(tokens_per_s=42)]
    wait_until(page, drawn(r"^M[^M]*L[^M]*M[^M]*L[^M]*$"))
    expect(cell(page.locator(".engine"), "peak")).to_have_text("peak 85.2")


def test_names_from_clients_are_only_text(page: Page, log: PageLog, server: AdminServer) -> None:
    """Markup in a tenant, a model or a state is shown letter by letter and makes no element."""
    server.streams = [stream(tenant=HOSTILE, model=HOSTILE, state=HOSTILE, engine=HOSTILE)]
    server.engines = [engine(reason=HOSTILE, models=[HOSTILE], engine=HOSTILE)]
    row = page.locator("#streams tr")
    for name in ("tenant", "model", "engine", "state"):
        expect(cell(row, name)).to_have_text(HOSTILE)
    expect(cell(page.locator(".engine"), "reason")).to_have_text(HOSTILE)
    expect(page.locator("main img")).to_have_count(0)
    expect(page).to_have_title("TokenFlow")
    assert log.errors == []


def test_policy_refuses_markup_and_inline_code(page: Page, log: PageLog) -> None:
    """The second line of defence works, and so does this file's check for violations."""
    expect(connection(page)).to_have_text("live")
    refused = "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } }"
    assert page.evaluate(refused) == "TypeError"
    page.evaluate("() => document.body.setAttribute('style', 'color: red')")
    wait_until(page, lambda: any("style-src" in error for error in log.errors))


def test_recovers_after_the_gateway_was_down(page: Page, log: PageLog, server: AdminServer) -> None:
    """While the gateway is away the page says so and keeps what it had; then it goes on by itself."""
    expect(connection(page)).to_have_text("live")
    server.stop()
    expect(connection(page)).to_have_text("gateway not reachable, retrying")
    expect(page.locator("#live")).to_have_class("stale")
    expect(page.locator("#streams tr")).to_have_count(1)

    server.streams = [stream(1), stream(2)]
    server.start()
    expect(connection(page)).to_have_text("live")
    expect(page.locator("#live")).not_to_have_class("stale")
    expect(page.locator("#streams tr")).to_have_count(2)
    assert log.not_about_loading() == []


def test_says_which_error_the_gateway_answered(page: Page, server: AdminServer) -> None:
    """A gateway that answers with an error is not called unreachable."""
    server.status = 503
    expect(connection(page)).to_have_text("gateway answered 503, retrying")
    server.status = 200
    expect(connection(page)).to_have_text("live")


def test_asks_for_the_admin_token(page: Page, log: PageLog, server: AdminServer) -> None:
    """Nothing is shown without the token; a wrong one is named so; the right one outlives a reload."""
    expect(connection(page)).to_have_text("live")
    server.token = "right"
    form = page.locator("#token-form")
    expect(form).to_be_visible()
    expect(page.locator("main")).to_be_hidden()
    expect(page.get_by_label("Admin token")).to_be_focused()
    asked = server.answers

    page.keyboard.type("wörong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("only ASCII")
    page.get_by_label("Admin token").fill("wrong")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("alert")).to_have_text("The gateway refused this token.")
    assert server.answers == asked + 1, "asked again without a new token"
    page.reload()
    expect(form).to_be_visible()
    expect(page.get_by_role("alert")).to_be_empty()

    page.get_by_label("Admin token").fill("right")
    page.keyboard.press("Enter")
    expect(page.locator("#streams tr")).to_have_count(1)
    expect(form).to_be_hidden()
    assert "right" not in page.url
    page.reload()
    expect(connection(page)).to_have_text("live")
    assert log.not_about_loading() == []


def test_a_gateway_that_shows_nobody_says_what_to_do(page: Page, server: AdminServer) -> None:
    """There is no token to ask for: the gateway's own advice is shown instead, as text."""
    server.closed = f"set TOKENFLOW_ADMIN_TOKEN {HOSTILE}"
    expect(connection(page)).to_contain_text("set TOKENFLOW_ADMIN_TOKEN <img")
    expect(page.locator("#token-form")).to_be_hidden()


def test_empty_states_say_what_to_do(page: Page, log: PageLog, server: AdminServer) -> None:
    """Without a stream the page gives a command that opens one here; without an engine it says so."""
    server.streams = []
    expect(page.get_by_text("No open stream. Try:")).to_be_visible()
    expect(page.locator("#try")).to_contain_text(f"curl -N {server.url}/v1/chat/completions")
    expect(page.locator("#try")).to_contain_text('"model":"SmolLM2-135M-Instruct"')
    expect(page.get_by_role("table")).to_be_hidden()
    server.engines = []
    expect(page.get_by_text("No engine is configured")).to_be_visible()
    expect(page.locator(".totals dd")).to_have_text(["0 of 0", "0", *[UNKNOWN] * 3, "0", UNKNOWN])
    assert log.errors == []


def test_says_when_the_list_is_cut(page: Page, server: AdminServer) -> None:
    """The total counts all streams, also those beyond the list."""
    server.streams, server.total = [stream(number) for number in range(500)], 1234
    expect(page.get_by_text("The oldest 500 of 1,234 open streams.")).to_be_visible()
    expect(page.locator("#total-streams")).to_have_text("1,234")
    server.total = None
    expect(page.locator("#more-streams")).to_be_hidden()


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_fits_the_screen(page: Page, server: AdminServer, width: int) -> None:
    """The page never scrolls sideways; a wide table does, in its own box; on a phone streams are cards."""
    server.engines = [engine(), unlinked("engine" * 20, reason="because " * 40)]
    server.streams = [stream(tenant="tenant" * 20, model="model" * 40)]
    page.set_viewport_size({"width": width, "height": 740})
    expect(page.locator(".engine")).to_have_count(2)
    expect(page.locator("#streams tr")).to_contain_text("tenanttenant")
    size = page.evaluate("() => [document.scrollingElement.scrollWidth, innerWidth]")
    assert size[0] <= size[1]
    box = "() => { const b = document.querySelector('#streams-box'); return b.scrollWidth > b.clientWidth; }"
    assert page.evaluate(box) is (width > 360)
    if width == 360:
        bar = cell(page.locator("#streams tr"), "unread-bar").bounding_box()
        assert bar is not None
        assert bar["width"] > 200, "the buffer is across the card"


def test_polls_one_at_a_time_and_not_while_hidden(browser: Browser, server: AdminServer) -> None:
    """A slow answer is waited for, and a hidden page asks for nothing until it is seen again."""
    with open_page(browser) as (page, _):
        page.clock.install()
        server.gate.clear()
        with page.expect_request("**/admin/engines"):
            page.goto(f"{server.url}/dashboard")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/admin/" in request.url else None)
        page.clock.run_for(2_000)
        assert asked == []

        set_hidden(page, hidden=True)
        server.gate.set()
        expect(connection(page)).to_have_text("live")
        page.clock.run_for(60_000)
        assert asked == [f"{server.url}/admin/streams"], "more than the poll that was under way"
        with page.expect_request("**/admin/engines"):
            set_hidden(page, hidden=False)


def set_hidden(page: Page, *, hidden: bool) -> None:
    script = """(hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(script, hidden)


def test_serves_its_files_and_no_others(server: AdminServer) -> None:
    """Each file has its type, must be checked again, and comes with the policy; nothing else is there."""
    with httpx.Client(base_url=server.url) as client:
        for path, kind in {"": "text/html", "/app.js": "text/javascript", "/style.css": "text/css"}.items():
            answer = client.get(f"/dashboard{path}")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
            assert "unsafe" not in answer.headers["content-security-policy"]
        for path in ("__init__.py", "index.html", "..%2fcli.py", "%2e%2e/cli.py", "nothing"):
            assert client.get(f"/dashboard/{path}").status_code == 404
        assert client.post("/dashboard").status_code == 405
        assert client.get("/dashboard/", follow_redirects=True).url.path == "/dashboard"
