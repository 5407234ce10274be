"""curl, and the eyes of the person at the terminal: what it prints is taken apart as the API's text says."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from job import Job, Outcome, serve


class CurlError(Exception):
    """An exit code, or an error that was printed."""

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class LeftError(Exception):
    """Ctrl-C."""


@contextmanager
def curl(*arguments: str) -> Iterator[IO[bytes]]:
    """What it prints; it is killed if somebody leaves early. Raises `CurlError` for an exit code."""
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "60", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        try:
            yield process.stdout
            if process.wait():
                raise CurlError(process.stderr.read().decode())
        finally:
            process.kill()


def chat(job: Job, outcome: Outcome) -> None:
    arguments = ["--json", json.dumps(job["body"]), "--write-out", "\n%{http_code}"]
    if job["retries"]:
        arguments += ["--retry", str(job["retries"]), "--fail"]
    with suppress(LeftError), curl(*arguments, f"{job['base_url']}/chat/completions") as printed:
        if job["body"].get("stream"):
            read_events(printed, outcome, job["leave_after"])
        else:
            body, _, status = printed.read().rpartition(b"\n")
            take_answer(body, int(status), outcome)


def read_events(printed: IO[bytes], outcome: Outcome, leave_after: int | None) -> None:
    rest = b""
    for line in printed:
        if not line.startswith(b"data:"):
            rest += line
            continue
        data = line.removeprefix(b"data:").strip()
        if data != b"[DONE]":
            take_chunk(json.loads(data), outcome)
        if outcome.chunks == leave_after:
            raise LeftError
    body, _, status = rest.rpartition(b"\n")
    if int(status or 0) >= 400:
        take_answer(body, int(status), outcome)


def take_chunk(chunk: dict[str, Any], outcome: Outcome) -> None:
    if error := chunk.get("error"):
        raise CurlError(json.dumps(error))
    outcome.add_chunk(chunk)


def take_answer(body: bytes, status: int, outcome: Outcome) -> None:
    if status >= 400:
        raise CurlError(body.decode(), status)
    outcome.add_chunk(json.loads(body))


def parse(job: Job, outcome: Outcome) -> None:
    chat(job, outcome)
    outcome.parsed = json.loads(outcome.texts[0])


def models(job: Job, outcome: Outcome) -> None:
    with curl(f"{job['base_url']}/models") as printed:
        outcome.models = [model["id"] for model in json.load(printed)["data"]]


version = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
serve(version, {"chat": chat, "parse": parse, "models": models})
