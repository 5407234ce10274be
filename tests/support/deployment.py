"""The files of `docker/` and `deploy/`, as the tests of both read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

__all__ = ["DEPLOY", "DOCKER", "ROOT", "alerts", "compose", "dashboard", "queries"]

ROOT = Path(__file__).parents[2]
DOCKER, DEPLOY = ROOT / "docker", ROOT / "deploy"


def compose(name: str) -> dict[str, Any]:
    """A compose file, its merge keys resolved and its variables as they stand."""
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())
    return loaded


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DOCKER / "grafana/dashboards/tokenflow.json").read_text())
    return loaded


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Every PromQL expression of the dashboard and the alerts, with where it stands."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$engine", ".*")
            yield f"panel {panel['title']}", expression
    for rule in alerts():
        yield f"alert {rule['alert']}", rule["expr"]
