"""A headless Chromium whose pages are hidden and shown as a person's are.

Playwright emulates focus on every page it opens, and such a page is never hidden. Here Chromium is started
apart and joined without Playwright's defaults: the page in front is visible, all others are hidden, with real
`visibilitychange` events and no animation frames.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import BrowserContext, BrowserType

from support.browser import find_chromium
from support.up import wait_until

__all__ = ["chromium_with_tabs"]

_FLAGS = ("--headless=new", "--disable-gpu", "--no-first-run", "--disable-sync", "--remote-debugging-port=0")
_START_S = 30.0


@contextmanager
def chromium_with_tabs(chromium: BrowserType, profile: Path) -> Iterator[BrowserContext]:
    """The context of a browser with a profile in this empty folder; `Page.bring_to_front` changes tabs.

    `chromium` is `Browser.browser_type` of any browser: Playwright runs once in a process.
    """
    flags = [*_FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.getuid() == 0 else [])]
    log = profile / "chromium.log"
    with log.open("w") as output:
        command = [find_chromium(), *flags, "about:blank"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        browser = chromium.connect_over_cdp(_address(profile, log), no_defaults=True)
        yield browser.contexts[0]
        browser.close()
    finally:
        process.terminate()
        process.wait()


def _address(profile: Path, log: Path) -> str:
    """Where Chromium says it listens: a file with its port and a path, once it does."""
    said = profile / "DevToolsActivePort"
    wait_until(
        lambda: said.exists() and said.read_text().count("\n") == 1,
        timeout_s=_START_S,
        what=f"Chromium does not listen, see {log}",
    )
    port, path = said.read_text().split()
    return f"ws://127.0.0.1:{port}{path}"
