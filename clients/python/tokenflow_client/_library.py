"""The HTTP library to work with: `httpx`, or `httpx2`, which openai for Python uses from 3.0 on.

The two have the same API under two names and share no class, so that what is made for one does not fit the
other. Everything here takes the library as a value.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

__all__ = ["Library", "LibraryName", "find_library"]

LibraryName = Literal["httpx", "httpx2"]
_CORES = {"httpx": "httpcore", "httpx2": "httpcore2"}


@dataclass(frozen=True)
class Library:
    """`http` is httpx or httpx2, `core` the connection pool below it."""

    name: str
    http: Any
    core: Any


def find_library(name: LibraryName | None = None) -> Library:
    """The library of this name; without one, that of the installed openai, or else whichever is there.

    Raises `ImportError` if there is none.
    """
    chosen = name or _library_of_openai() or next(filter(find_spec, _CORES), None)
    if chosen is None:
        raise ImportError(
            "tokenflow_client needs httpx or httpx2 (either comes with openai): pip install httpx"
        )
    return Library(chosen, importlib.import_module(chosen), importlib.import_module(_CORES[chosen]))


def _library_of_openai() -> str | None:
    """Whose client `openai.DefaultHttpxClient` is."""
    if find_spec("openai") is None:
        return None
    ancestors = importlib.import_module("openai").DefaultHttpxClient.__mro__
    roots = (ancestor.__module__.partition(".")[0] for ancestor in ancestors)
    return next((root for root in roots if root in _CORES), None)
