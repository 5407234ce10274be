"""Progress lines: in place on a terminal, few and whole elsewhere."""

from __future__ import annotations

import io

import pytest

from tokenflow_gateway.local.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_notes_come_every_fifteen_seconds():
    stream, clock = io.StringIO(), Clock()
    with Progress(1, stream=stream, clock=clock).stage("download") as stage:
        for second in range(40):
            clock.now = float(second)
            stage.note("Downloading")
    assert stream.getvalue().splitlines() == [
        "[1/1] download ...",
        "[1/1] download ... 15 s  Downloading",
        "[1/1] download ... 30 s  Downloading",
        "[1/1] download done (39 s)",
    ]


def test_on_a_terminal_the_line_is_rewritten_in_place():
    stream, clock = Terminal(), Clock()
    with Progress(1, stream=stream, clock=clock).stage("download") as stage:
        clock.now = 2.0
        stage.note("x" * 500)
    assert stream.getvalue().count("\n") == 1
    assert "\r\x1b[K[1/1] download ... 2 s  xxx" in stream.getvalue()
    assert max(len(part) for part in stream.getvalue().split("\r")) < 500


def test_a_failed_stage_does_not_claim_to_be_done():
    stream = io.StringIO()

    def fail() -> None:
        with Progress(1, stream=stream).stage("download"):
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # any error will do
        fail()
    assert "stopped" in stream.getvalue()
    assert "done" not in stream.getvalue()
