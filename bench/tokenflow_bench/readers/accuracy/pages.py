"""Readers in a real browser: a page that paces text with the JavaScript client and notes what it shows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from playwright.sync_api import Browser, BrowserContext, Page
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from support.browser import headless_chromium
from support.chat_server import Served
from support.tabs import chromium_with_tabs
from tokenflow_bench.readers.accuracy.reader_process import Reading, Task

__all__ = ["Browsers"]

_PAGE = Path(__file__).parent / "page"
_VENDOR = Path(__file__).parents[4] / "examples" / "web-chat" / "vendor"
_CLOCK_TRIES = 15


class Browsers:
    """Two of them: pages in the first are always visible, those in the second only when in front."""

    def __init__(self, site: Served, browser: Browser, tabs: BrowserContext) -> None:
        self._site = site
        self._browser = browser
        self._tabs = tabs

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Self]:
        files = [
            Mount("/vendor", StaticFiles(directory=_VENDOR)),
            Mount("/", StaticFiles(directory=_PAGE, html=True)),
        ]
        with ExitStack() as stack:
            site = stack.enter_context(Served(Starlette(routes=files)))
            browser = stack.enter_context(headless_chromium())
            profile = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            tabs = stack.enter_context(chromium_with_tabs(browser.browser_type, profile))
            yield cls(site, browser, tabs)

    def read(self, tasks: Sequence[Task]) -> list[Reading]:
        """All of them at the same time; at most one may pause by hiding."""
        readers = [self._open(task) for task in tasks]
        try:
            begun = time.monotonic()
            for reader in readers:
                reader.begin()
            self._hide_for_a_while(readers, begun)
            _wait_until(begun + max(reader.total_s for reader in readers))
            return [reader.end() for reader in readers]
        finally:
            for reader in readers:
                reader.page.close()

    def _open(self, task: Task) -> _PageReader:
        context = self._tabs if task.options.get("pause_by") == "hiding" else self._browser
        page = context.new_page()
        page.goto(self._site.url)
        page.wait_for_function("() => globalThis.reader !== undefined")
        return _PageReader(page, task, _clock_offset_s(page))

    def _hide_for_a_while(self, readers: Sequence[_PageReader], begun: float) -> None:
        """Another tab comes to the front as long as the task pauses."""
        for reader in readers:
            if reader.task.options.get("pause_by") != "hiding":
                continue
            (before_s, _), (pause_s, _), _ = reader.task.segments
            _wait_until(begun + before_s)
            other = self._tabs.new_page()
            other.bring_to_front()
            _wait_until(begun + before_s + pause_s)
            other.close()
            reader.page.bring_to_front()


@dataclass(frozen=True)
class _PageReader:
    """`offset_s` turns the page's clock into the machine's monotonic one."""

    page: Page
    task: Task
    offset_s: float

    @property
    def total_s(self) -> float:
        return sum(seconds for seconds, _ in self.task.segments)

    def begin(self) -> None:
        options = self.task.options
        given = {
            "url": self.task.url,
            "model": self.task.model,
            "segments": self.task.segments,
            "pauseBy": options.get("pause_by"),
        }
        self.page.evaluate("(task) => { void reader.begin(task); }", given)

    def end(self) -> Reading:
        noted = self.page.evaluate("() => reader.end()")
        if noted["error"]:
            raise RuntimeError(f"a page failed: {noted['error']}")
        return _reading(noted, self._at)

    def _at(self, page_ms: float) -> float:
        return page_ms / 1000 + self.offset_s


def _reading(noted: Mapping[str, Any], at: Any) -> Reading:
    return Reading(
        window=(at(noted["begunMs"]), at(noted["endedMs"])),
        positions=[(at(ms), tokens) for ms, tokens in noted["shown"]],
        pauses=[(at(begin), at(end)) for begin, end in noted["pauses"]],
    )


def _clock_offset_s(page: Page) -> float:
    """Monotonic time minus the page's, from the question that was answered fastest."""
    tries = []
    for _ in range(_CLOCK_TRIES):
        before = time.monotonic()
        page_ms: float = page.evaluate("() => performance.now()")
        after = time.monotonic()
        tries.append((after - before, (before + after) / 2 - page_ms / 1000))
    return min(tries)[1]


def _wait_until(at: float) -> None:
    time.sleep(max(at - time.monotonic(), 0.0))
