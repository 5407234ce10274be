"""The configuration's JSON schema, for editors and pipelines; docs/gateway.schema.json is a copy."""

from __future__ import annotations

from typing import Any

from tokenflow_gateway.config import Settings

__all__ = ["config_schema"]


def config_schema() -> dict[str, Any]:
    """Says of a file what `load_settings` would, but for what one field says of another.

    Engines may be URLs alone; nothing is required, because the environment and the command line may give it.
    """
    schema = Settings.model_json_schema(mode="validation")
    engines = schema["properties"]["engines"]
    engines["items"] = {"anyOf": [{"type": "string", "format": "uri"}, engines["items"]]}
    schema.pop("required", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Configuration of the TokenFlow gateway",
    }
