"""The shapes of the control API's answers, for its OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = [
    "DrainingChoice",
    "Engines",
    "Error",
    "Health",
    "Model",
    "Models",
    "PolicyChoice",
    "Streams",
    "errors",
]


class PolicyChoice(BaseModel):
    """The name of a scheduling policy."""

    policy: str


class DrainingChoice(BaseModel):
    """Whether an engine is to get no new requests."""

    draining: bool


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the request that is at fault."""
    code: str | None


class Error(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class Model(BaseModel):
    """A model as its engine describes it."""

    model_config = ConfigDict(extra="allow")

    id: str


class Models(BaseModel):
    """The models of all healthy engines."""

    object: str
    data: list[Model]


class Health(BaseModel):
    """In words."""

    status: str


class Engines(BaseModel):
    """Every engine; `at` is Unix time."""

    at: float
    engines: list[dict[str, Any]]


class Streams(BaseModel):
    """Open streams; `total` counts those beyond the list, too."""

    at: float
    total: int
    streams: list[dict[str, Any]]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These statuses come with an `Error`."""
    return {status: {"model": Error, "description": _MEANINGS[status]} for status in statuses}


_MEANINGS = {
    400: "The request cannot be used; `param` names the field.",
    401: "The key or token is missing, or not valid.",
    403: "Not from here: a web page under another name than this machine's, or no admin token is set.",
    404: "There is nothing of this name.",
    409: "The engine is not linked.",
    413: "The body is too large.",
    503: "Not now.",
}
