"""The recordings: kept as they were, and fit to be published."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.transcripts import Read, Transcript, load, names


def test_transcripts_survive_a_round_trip(tmp_path: Path) -> None:
    """Saved and loaded again they are the same, also where a read cuts a character in half."""
    cut = "é".encode()
    reads = (Read(1.5, b"data: " + cut[:1]), Read(0.0, cut[1:] + b"\n\n"))
    transcript = Transcript(
        name="cut",
        engine="none",
        model="none",
        method="GET",
        path="/",
        body=None,
        status=200,
        headers={"content-type": "text/event-stream"},
        reads=reads,
    )
    transcript.save(tmp_path)
    assert load("cut", folder=tmp_path) == transcript
    with pytest.raises(FileNotFoundError, match="there are: cut"):
        load("cat", folder=tmp_path)


@pytest.mark.parametrize("name", names())
def test_transcripts_speak_of_no_machine(name: str) -> None:
    """No address, no path of the machine that recorded them."""
    data = load(name).data
    for trace in (b"127.0.0.1", b"localhost", b"site-packages", b"/tmp/", b"/home/", b"/root/"):
        assert trace not in data
