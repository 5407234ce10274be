"""What is served under ``/v1``: which routes are followed, which pass through, and with which methods.

A route that is in neither table is refused here, so that no path of an engine is open to clients by chance.
docs/api.md says the same in words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from tokenflow_gateway.relay.dialects import DIALECTS
from tokenflow_gateway.relay.errors import MethodNotAllowed, NotServed

__all__ = ["PASSED", "check_route", "methods_of", "response_of", "route_of"]

_POST: Final = ("POST",)

PASSED: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/audio/speech": _POST,
    "/v1/audio/transcriptions": _POST,
    "/v1/audio/translations": _POST,
    "/v1/classify": _POST,
    "/v1/decisions": _POST,
    "/v1/detokenize": _POST,
    "/v1/embeddings": _POST,
    "/v1/images/edits": _POST,
    "/v1/images/generations": _POST,
    "/v1/messages/count_tokens": _POST,
    "/v1/moderations": _POST,
    "/v1/rerank": _POST,
    "/v1/responses/{response_id}": ("GET", "DELETE"),
    "/v1/responses/{response_id}/cancel": _POST,
    "/v1/score": _POST,
    "/v1/tokenize": _POST,
}
"""Routes whose requests and answers pass unread, each with its methods."""

_RESPONSE: Final = re.compile(r"/v1/responses/(?!\.\.?(/|$))(?P<id>[^/]+)(?P<cancel>/cancel)?")
"""A dot segment is no id: a proxy before an engine may take it for another path."""
_STATEFUL: Final = re.compile(
    r"/v1/(assistants|batches|conversations|files|fine_tuning|threads|uploads|vector_stores)\b"
)


def route_of(path: str) -> str | None:
    """The route that a path belongs to, as the tables name it; None for those that are not served."""
    if path in DIALECTS or path in PASSED:
        return path
    match = _RESPONSE.fullmatch(path)
    if match is None:
        return None
    return "/v1/responses/{response_id}" + (match["cancel"] or "")


def response_of(path: str) -> str | None:
    """Id of the stored response that a path names; None for all others."""
    match = _RESPONSE.fullmatch(path)
    return None if match is None else match["id"]


def methods_of(path: str) -> tuple[str, ...]:
    """What may be asked of a path; nothing of one that is not served."""
    route = route_of(path)
    return () if route is None else (*PASSED.get(route, _POST), "OPTIONS")


def check_route(method: str, path: str) -> None:
    """Raises `NotServed` or `MethodNotAllowed` for what no engine is asked."""
    route = route_of(path)
    if route is None:
        why = ": engines keep no files or jobs, and neither does the gateway" if _STATEFUL.match(path) else ""
        raise NotServed(f"no such route: {method} {path}{why}")
    if method not in PASSED.get(route, _POST):
        raise MethodNotAllowed(method, path, methods_of(path))
