"""The front ends' configurations under examples/: the names in them are those the front ends and we know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tokenflow_gateway.config import Settings
from tokenflow_gateway.relay.request import read_delivery, read_reader

EXAMPLES = Path(__file__).parents[2] / "examples"

OPEN_WEBUI_VARIABLES = {
    "ENABLE_FORWARD_USER_INFO_HEADERS",
    "ENABLE_OLLAMA_API",
    "ENABLE_OPENAI_API",
    "FORWARD_USER_INFO_HEADER_USER_ID",
    "OPENAI_API_BASE_URL",
    "OPENAI_API_BASE_URLS",
    "OPENAI_API_KEY",
    "OPENAI_API_KEYS",
}
"""From open-webui/open-webui, `backend/open_webui/env.py` and `config.py`."""

LIBRECHAT_ENDPOINT = {
    "addParams",
    "apiKey",
    "baseURL",
    "customParams",
    "directEndpoint",
    "dropParams",
    "headers",
    "iconURL",
    "modelDisplayLabel",
    "models",
    "name",
    "provider",
    "streamRate",
    "titleConvo",
    "titleEndpoint",
    "titleMessageRole",
    "titleMethod",
    "titleModel",
    "titlePrompt",
    "titlePromptTemplate",
    "titleTiming",
    "tokenConfig",
}
"""From danny-avila/LibreChat, `packages/data-provider/src/config.ts`: `endpointSchema` (version 1.3.17)."""
LIBRECHAT_MODELS = {"default", "fetch", "userIdQuery"}
USER_HEADER: str = Settings.model_fields["user_header"].default


def parsed(path: str) -> Any:
    return yaml.safe_load((EXAMPLES / path).read_text(encoding="utf-8"))


def test_open_webui_is_given_variables_it_knows() -> None:
    (service,) = parsed("open-webui/compose.yaml")["services"].values()
    environment = service["environment"]
    assert set(environment) <= OPEN_WEBUI_VARIABLES
    assert all(isinstance(value, str) for value in environment.values()), "compose takes strings only"
    assert environment["OPENAI_API_BASE_URL"].endswith(":8080/v1")
    assert environment["ENABLE_FORWARD_USER_INFO_HEADERS"] == "true"
    assert environment["FORWARD_USER_INFO_HEADER_USER_ID"] == USER_HEADER


def test_librechat_is_given_an_endpoint_of_its_schema() -> None:
    config = parsed("librechat/librechat.yaml")
    assert set(config) == {"version", "cache", "endpoints"}
    (endpoint,) = config["endpoints"]["custom"]
    assert set(endpoint) <= LIBRECHAT_ENDPOINT
    assert {"name", "apiKey", "baseURL", "models"} <= set(endpoint), "those that are required"
    assert set(endpoint["models"]) <= LIBRECHAT_MODELS
    assert endpoint["models"]["default"], "at least one"
    assert endpoint["baseURL"].endswith(":8080/v1")
    assert endpoint["headers"][USER_HEADER] == "{{LIBRECHAT_USER_ID}}"


def test_the_headers_of_the_examples_mean_something_to_the_gateway() -> None:
    (endpoint,) = parsed("librechat/librechat.yaml")["endpoints"]["custom"]
    headers = [(name.lower().encode(), value.encode()) for name, value in endpoint["headers"].items()]
    assert read_delivery(headers) == "paced"
    assert read_reader(headers, {}, user_header=USER_HEADER).user == "{{LIBRECHAT_USER_ID}}"


def test_librechats_container_finds_its_file() -> None:
    override = parsed("librechat/docker-compose.override.yml")["services"]["api"]
    (mount,) = override["volumes"]
    assert (EXAMPLES / "librechat" / mount["source"]).is_file()
    assert mount["target"] == "/app/librechat.yaml"
