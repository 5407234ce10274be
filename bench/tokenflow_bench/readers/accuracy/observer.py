"""Looks at ``/admin/streams`` twenty times a second and keeps what it saw."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import defaultdict
from typing import Any, Self
from urllib.parse import urlsplit

from tokenflow_bench.readers.accuracy.measure import Sample

__all__ = ["Observer"]

INTERVAL_S = 0.05


class Observer:
    """A thread, as a context manager. `samples` are by the name of the model that was asked for."""

    def __init__(self, gateway_url: str) -> None:
        self.samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self._connection = http.client.HTTPConnection(urlsplit(gateway_url).netloc, timeout=10)
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="observer")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
        self._connection.close()
        if self._failure:
            raise RuntimeError("the gateway's streams could not be observed") from self._failure

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._over.wait(max(due - time.monotonic(), 0.0)):
                due = max(due + INTERVAL_S, time.monotonic())
                self._look()
        except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
            self._failure = error

    def _look(self) -> None:
        begin = time.monotonic()
        self._connection.request("GET", "/admin/streams")
        answer = self._connection.getresponse()
        body = answer.read()
        end = time.monotonic()
        for stream in json.loads(body)["streams"]:
            self.samples[stream["model"]].append(_sample(stream, begin=begin, end=end))


def _sample(stream: dict[str, Any], *, begin: float, end: float) -> Sample:
    return Sample(
        at_s=(begin + end) / 2,
        took_s=end - begin,
        generated=stream["generated"],
        consumed=stream["consumed"],
        buffered=stream["buffered"],
        rate=stream["rate"],
        state=stream["reader_state"],
        source=stream["source"],
    )
