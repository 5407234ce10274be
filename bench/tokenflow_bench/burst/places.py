"""Where each stream's KV was during a run, as the gateway's admin view shows it a few times a second."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

__all__ = ["Places", "kv_is_away"]

_EVERY_S = 0.5
_TIMEOUT_S = 5.0


class Places:
    """Looks from a thread of its own while it is entered; a look that fails is raised at the end."""

    def __init__(self, url: str, *, every_s: float = _EVERY_S) -> None:
        self._url = f"{url}/admin/streams"
        self._every_s = every_s
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="places")
        self._looking: Future[None] | None = None
        self._away: list[tuple[float, frozenset[str]]] = []
        """Times of the monotonic clock, and whose KV was not on the device then."""

    def was_away(self, stream: str, begin: float, end: float) -> bool:
        """Whether at some look within this time its KV was not on the device."""
        return any(begin <= at <= end and stream in away for at, away in self._away)

    def __enter__(self) -> Places:
        self._looking = self._threads.submit(self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._looking is not None
        self._stop.set()
        self._threads.shutdown()
        if kind is None:
            self._looking.result()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            away = frozenset(stream["id"] for stream in self._look() if kv_is_away(stream))
            self._away.append((time.monotonic(), away))

    def _look(self) -> list[dict[str, Any]]:
        try:
            with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - our own
                streams: list[dict[str, Any]] = json.load(answer)["streams"]
                return streams
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(f"{self._url} answers {error.code}") from None


def kv_is_away(stream: Mapping[str, Any]) -> bool:
    """Of a stream that has begun: in host memory, on its way, or given up, so that a prefill is to come."""
    return bool(stream["offloaded"] or (stream["state"] == "waiting" and stream["generated"]))
