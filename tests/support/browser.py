"""A headless Chromium for end-to-end tests, and a record of what went wrong on its pages.

Use it from a module-scoped fixture: Playwright's synchronous API keeps an event loop of its own, which must
be gone before asynchronous tests of other modules run::

    @pytest.fixture(scope="module")
    def browser() -> Iterator[Browser]:
        with headless_chromium() as browser:
            yield browser
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

__all__ = ["PageLog", "find_chromium", "headless_chromium", "open_page"]

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
_REPORT_VIOLATIONS = """
addEventListener("securitypolicyviolation", (violation) =>
  console.error(`CSP violation: ${violation.violatedDirective} ${violation.blockedURI}`));
"""


class PageLog:
    """Everything of a page that a person would see red in the developer tools."""

    def __init__(self, page: Page) -> None:
        self.errors: list[str] = []
        self.requested: set[str] = set()
        page.on("console", lambda message: self._add(message.text, of=message.type))
        page.on("pageerror", lambda error: self._add(str(error), of="error"))
        page.on("request", lambda request: self.requested.add(request.url))

    def _add(self, text: str, *, of: str) -> None:
        if of in ("error", "warning"):
            self.errors.append(text)

    def not_about_loading(self) -> list[str]:
        """Errors other than the lines Chromium itself writes when a request fails."""
        return [error for error in self.errors if not error.startswith("Failed to load resource")]


def find_chromium() -> str:
    """Path of the first Chromium on PATH."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise RuntimeError("no Chromium found: install one, for example with `apt-get install chromium`")
    return found


@contextmanager
def headless_chromium() -> Iterator[Browser]:
    """A running browser, closed at the end."""
    flags = [*_FLAGS, "--no-sandbox"] if os.getuid() == 0 else [*_FLAGS]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=flags)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Browser, **context_options: Any) -> Iterator[tuple[Page, PageLog]]:
    """An empty page in a context of its own; options are those of `Browser.new_context`."""
    context = browser.new_context(**context_options)
    try:
        page = context.new_page()
        page.add_init_script(_REPORT_VIOLATIONS)
        yield page, PageLog(page)
    finally:
        context.close()
