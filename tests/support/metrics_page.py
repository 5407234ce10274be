"""The table of docs/metrics.md, from the metrics themselves: ``python -m support.metrics_page`` writes it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.registry import Collector

from support.deployment import ROOT
from tokenflow_gateway.app import Gateway
from tokenflow_gateway.config import load_settings
from tokenflow_gateway.server import server_for

__all__ = ["BEGIN", "PAGE", "families", "page_with_table"]

PAGE = ROOT / "docs/metrics.md"
BEGIN = "<!-- written by python -m support.metrics_page -->\n"
_HEAD = "| metric | type | labels | what it says |\n|---|---|---|---|\n"


def families() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Every metric of a gateway: the name that queries use, its type, its labels, its help."""
    settings = load_settings(overrides={"engines": ["http://127.0.0.1:30000"]})
    gateway = server_for(settings).config.app
    assert isinstance(gateway, Gateway)
    collectors: list[Collector] = list(gateway.metrics.registry._collector_to_names)
    for collector in collectors:
        for family in collector.collect():
            labels = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield name, family.type, tuple(labels), family.documentation


def page_with_table(page: str) -> str:
    """`page` with the table as it should be at its end."""
    rows = (
        f"| `{name}` | {kind} | {', '.join(labels)} | {text} |\n"
        for name, kind, labels, text in sorted(families())
    )
    return page.partition(BEGIN)[0] + BEGIN + _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
