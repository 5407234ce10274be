"""The OpenAPI document at ``/openapi.json``: FastAPI's of the control API, `relayed.yaml` for the rest."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tokenflow_gateway.relay.routes import PASSED

__all__ = ["document"]

_FASTAPIS_OWN = ("HTTPValidationError", "ValidationError")
"""Shapes of an error that this application has in OpenAI's shape, with status 400."""


def document(app: FastAPI) -> dict[str, Any]:
    """Everything that is served but the pages for people."""
    spec: dict[str, Any] = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    relayed = _relayed()
    spec["paths"] = {**_without_422(spec["paths"]), **relayed["paths"], **_passed()}
    components = spec["components"]
    for kind, parts in relayed["components"].items():
        components[kind] = {**components.get(kind, {}), **parts}
    for name in _FASTAPIS_OWN:
        components["schemas"].pop(name, None)
    return spec


@cache
def _relayed() -> dict[str, Any]:
    text = files(__package__).joinpath("relayed.yaml").read_text(encoding="utf-8")
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def _without_422(paths: dict[str, Any]) -> dict[str, Any]:
    for operations in paths.values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    return paths


def _passed() -> dict[str, Any]:
    """Routes that pass unread: what they take and answer is the engine's to say."""
    return {
        path: {method.lower(): _passed_operation(path, method) for method in methods}
        for path, methods in PASSED.items()
    }


def _passed_operation(path: str, method: str) -> dict[str, Any]:
    any_content: dict[str, Any] = {"content": {"*/*": {}}}
    operation: dict[str, Any] = {
        "tags": ["passed through"],
        "summary": "Passed to an engine that serves it, and its answer back.",
        "operationId": f"{method.lower()}{path}".replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {
            "2XX": {"description": "The engine's answer.", **any_content},
            "4XX": {"$ref": "#/components/responses/Refused"},
            "5XX": {"$ref": "#/components/responses/Failed"},
        },
    }
    if "{response_id}" in path:
        operation["parameters"] = [
            {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if method == "POST" and "{" not in path:
        operation["requestBody"] = any_content
    return operation
