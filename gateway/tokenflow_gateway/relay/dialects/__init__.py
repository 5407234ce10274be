"""The APIs whose answers are followed token by token, by route. Other routes pass through unread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tokenflow_gateway.relay.dialects.base import Dialect, Document, Meter
from tokenflow_gateway.relay.dialects.completions import CompletionsDialect
from tokenflow_gateway.relay.dialects.messages import MessagesDialect
from tokenflow_gateway.relay.dialects.responses import ResponsesDialect

__all__ = ["DIALECTS", "Dialect", "Document", "Meter", "dialect_of"]

_OPENAI: Final = CompletionsDialect()
_MESSAGES: Final = MessagesDialect()

DIALECTS: Final[Mapping[str, Dialect]] = {
    "/v1/chat/completions": _OPENAI,
    "/v1/completions": _OPENAI,
    "/v1/messages": _MESSAGES,
    "/v1/responses": ResponsesDialect(),
}


def dialect_of(path: str) -> Dialect:
    """The dialect in which a client of this route expects errors: its own, and OpenAI's for all the rest."""
    found = DIALECTS.get(path)
    if found is not None:
        return found
    return _MESSAGES if path.startswith("/v1/messages/") else _OPENAI
