"""What the documentation names is there: files, headings, commands, targets of make, metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenflow_gateway.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in (
        "*.md",
        "docs/*.md",
        "examples/*/README.md",
        "clients/js/README.md",
        "tests/gpu/README.md",
    )
    for page in ROOT.glob(pattern)
)
_LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"(?:`|^    )tokenflow ([a-z][a-z-]*)", re.MULTILINE)
_TARGET = re.compile(r"(?:`|^    )make ([a-z][a-z-]*)", re.MULTILINE)
_METRIC = re.compile(r"`(tokenflow_[a-z_]+[a-z])\b")
_NO_METRICS = {"tokenflow_client", "tokenflow_bench", "tokenflow_engine"}


def dead_links(page: Path) -> list[str]:
    """Links within the repository that lead nowhere."""
    dead = []
    for path, heading in _LINK.findall(_FENCED.sub("", page.read_text())):
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in headings(target)):
            dead.append(f"{path}#{heading}")
    return dead


def headings(page: Path) -> set[str]:
    """As links spell them."""
    found = re.findall(r"^#+ (.*)", _FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert dead_links(page) == []
    assert set(_COMMAND.findall(text)) <= set(cli.commands)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(_TARGET.findall(text)) <= set(targets)
    metrics = set(
        re.findall(r"^\| `(tokenflow_\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    )
    assert set(_METRIC.findall(text)) - _NO_METRICS <= metrics


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](#one-two) [b](#three) [c](other.md) [d](page.md#one-two) [e](https://a.b/#c)\n"
    )
    assert dead_links(page) == ["#three", "other.md#"]
