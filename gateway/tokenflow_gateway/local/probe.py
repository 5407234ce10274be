"""Asking a server on this machine whether it is ready."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from http import HTTPStatus

__all__ = ["first_model", "is_ready", "wants_key"]

TIMEOUT_S = 2.0
# A proxy of the environment is for the world outside, not for this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_ready(url: str) -> bool:
    """Whether a GET of `url` answers 200 within two seconds."""
    try:
        with _opener.open(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False


def first_model(base_url: str) -> str | None:
    """The first model that an OpenAI-compatible server lists, or None while it cannot say."""
    try:
        with _opener.open(f"{base_url}/v1/models", timeout=TIMEOUT_S) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError, LookupError):
        return None


def wants_key(base_url: str) -> bool:
    """Whether an OpenAI-compatible server refuses who has no key."""
    try:
        with _opener.open(f"{base_url}/v1/models", timeout=TIMEOUT_S):
            return False
    except urllib.error.HTTPError as error:
        return error.code == HTTPStatus.UNAUTHORIZED
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False
