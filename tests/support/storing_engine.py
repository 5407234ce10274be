"""An engine made of nothing that stores responses as SGLang does, under the name that it is given.

Engines of another kind give names of their own.
"""

from __future__ import annotations

import json
from typing import Any

from support import scenarios
from support.replay_engine import ReplayEngine, Script, SeenRequest, Send

__all__ = ["RESPONSES", "StoringEngine"]

RESPONSES = "/v1/responses"
_USAGE = {"input_tokens": 30, "output_tokens": 70}


class StoringEngine(ReplayEngine):
    """A response is complete at once; one in the background stays as it is until `end`, or a cancel."""

    def __init__(self, *, is_sglang: bool = True) -> None:
        super().__init__(scenarios.sglang())
        if not is_sglang:
            del self.scripts["/model_info"]
        self.stored: dict[str, dict[str, Any]] = {}
        self.tells_ids = True

    def end(self, rid: str, status: str = "completed") -> None:
        self.stored[rid] |= {"status": status, "usage": _USAGE}

    def script_for(self, seen: SeenRequest) -> Script:
        if not seen.path.startswith(RESPONSES):
            return super().script_for(seen)
        if seen.path == RESPONSES:
            asked = seen.json()
            if asked.get("previous_response_id", "") not in {"", *self.stored}:
                return _unknown()
            rid = asked.get("request_id", f"resp_{len(self.stored)}")
            self.stored[rid] = {"id": rid, "status": "queued", "usage": None}
            if not asked.get("background"):
                self.end(rid)
            answer = dict(self.stored[rid])
            if not self.tells_ids:
                del answer["id"]
            return _document(answer)
        rid, _, what = seen.path.removeprefix(f"{RESPONSES}/").partition("/")
        if rid not in self.stored:
            return _unknown()
        if what == "cancel":
            self.stored[rid]["status"] = "cancelled"
        return _document(self.stored[rid])

    def forget_bodies(self) -> None:
        """Of the requests that it has seen."""
        for seen in self.requests:
            seen.body = b""

    @property
    def cancelled(self) -> list[str]:
        """Responses that it was told to give up."""
        return [
            seen.path.removeprefix(f"{RESPONSES}/").removesuffix("/cancel")
            for seen in self.requests
            if seen.method == "POST" and seen.path.endswith("/cancel")
        ]

    @property
    def aborted(self) -> list[str]:
        """Requests that it was told to give up."""
        return [seen.json()["rid"] for seen in self.requests if seen.path == "/abort_request"]


def _unknown() -> Script:
    return _document({"error": {"message": "not found", "type": "invalid_request_error"}}, status=404)


def _document(value: object, *, status: int = 200) -> Script:
    body = json.dumps(value).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    return Script(status=status, headers=headers, steps=[Send(body)])
