"""Whose KV left the device while its reader paused, by the gateway's view, and how the others fared."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tokenflow_bench.burst.pausing import pausing_figures
from tokenflow_bench.burst.places import Places, kv_is_away
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.reading import Person

PAUSING = Person.with_pauses(1.0, [(2.0, 12.0)])


def stream(rid: str, **changed: Any) -> dict[str, Any]:
    return {"id": rid, "state": "running", "generated": 9, "offloaded": False} | changed


@pytest.mark.parametrize(
    ("changed", "is_away"),
    [
        ({}, False),
        ({"state": "parked"}, False),
        ({"state": "parked", "offloaded": True}, True),
        ({"state": "waiting"}, True),
        ({"state": "waiting", "generated": 0}, False),
    ],
)
def test_where_kv_is(changed: dict[str, Any], is_away: bool):
    assert kv_is_away(stream("a", **changed)) is is_away


@contextmanager
def admin_view(*, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]], threading.Semaphore]]:
    """A gateway's view of streams, what it shows, and a semaphore released at each look."""
    shown: list[dict[str, Any]] = []
    looks = threading.Semaphore(0)

    class View(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"streams": shown}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            looks.release()

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), View)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", shown, looks
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def test_looks_say_who_was_away_and_when():
    with admin_view() as (url, shown, looks):
        shown[:] = [stream("a", offloaded=True), stream("b")]
        begin = time.monotonic()
        with Places(url, every_s=0.01) as places:
            for _ in range(3):
                assert looks.acquire(timeout=10)
            middle = time.monotonic()
            shown[:] = [stream("a"), stream("b")]
            for _ in range(3):
                assert looks.acquire(timeout=10)
            again = time.monotonic()
            for _ in range(2):
                assert looks.acquire(timeout=10)
        end = time.monotonic()
    assert places.was_away("a", begin, middle)
    assert not places.was_away("a", again, end)
    assert not places.was_away("b", begin, end)
    assert not places.was_away("a", 0.0, begin)


def test_a_view_that_cannot_be_had_fails_the_run():
    with admin_view(status=500) as (url, _shown, looks):
        places = Places(url, every_s=0.01)
        places.__enter__()
        assert looks.acquire(timeout=10)
        with pytest.raises(RuntimeError, match="answers 500"):
            places.__exit__(None, None, None)


def log(name: str, token_s: list[float], person: Person) -> StreamLog:
    return StreamLog(
        index=0, due_s=0.0, person=person, output_tokens=9, token_s=token_s, end_s=token_s[-1], stream=name
    )


def test_kv_that_left_is_counted_among_answers_under_way():
    """The third's answer had come before its pause; the fourth does not pause, its first token comes at 3."""
    logs = [
        log("a", [1.0, 1.0, 20.0], PAUSING),
        log("b", [0.0, 0.0, 20.0], PAUSING),
        log("c", [0.0, 0.0, 1.0], PAUSING),
        log("d", [3.0, 5.0], Person(1.0)),
    ]
    asked: list[tuple[str, float, float]] = []

    def was_away(name: str, begin: float, end: float) -> bool:
        asked.append((name, begin, end))
        return name == "a"

    figures = pausing_figures(logs, was_away, horizon_s=60, window_s=30, target_s=1)
    assert figures is not None
    assert asked == [("a", 3.0, 13.0), ("b", 2.0, 12.0)]
    assert (figures["generating"], figures["moved_out"]) == (2, 1)
    assert figures["others"]["ttft_mean_s"] == 3.0
    assert figures["others"]["wait_mean_s"] == 4.0  # and a second dry, from 4 to 5
    assert pausing_figures(logs[3:], was_away, horizon_s=60, window_s=30, target_s=1) is None
