"""What `tokenflow up` asks of a server on this machine, by a server that is there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from tokenflow_gateway.local.probe import first_model, is_ready, wants_key


@contextmanager
def server(status: int) -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "tiny"}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_given: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as listening:
        threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


def test_an_open_server_names_its_model_and_wants_no_key() -> None:
    with server(200) as url:
        assert (is_ready(url), first_model(url), wants_key(url)) == (True, "tiny", False)


def test_a_server_that_refuses_strangers_wants_a_key() -> None:
    with server(401) as url:
        assert (is_ready(url), first_model(url), wants_key(url)) == (False, None, True)


def test_a_server_that_is_in_trouble_or_gone_says_nothing_of_keys() -> None:
    with server(503) as url:
        assert (first_model(url), wants_key(url)) == (None, False)
    assert (is_ready(url), first_model(url), wants_key(url)) == (False, None, False)
