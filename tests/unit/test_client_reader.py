"""What an application says about its reader."""

from __future__ import annotations

from typing import Any

import pytest

import tokenflow_client
from tokenflow_client import TokenFlowReader
from tokenflow_client._reader import READER_ID, find_reader


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0}, "rate must be a positive number, not 0"),
        ({"rate": 1001}, "rate must be at most 1000 tokens per second, not 1001"),
        ({"rate": float("nan")}, "rate must be a positive number, not nan"),
        ({"ttft_ms": -1}, "ttft_ms must be a positive number, not -1"),
        ({"kind": "robot"}, "kind must be one of human, voice, machine, not 'robot'"),
        ({"delivery": "fast"}, "delivery must be one of immediate, paced, not 'fast'"),
        ({"evidence": "guess"}, "evidence must be one of pull, shown, none, not 'guess'"),
        ({"sla": "gold\r\nX-Evil: 1"}, "sla must be plain printable text"),
    ],
)
def test_bad_settings_are_told_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenFlowReader(**settings)


def test_bad_settings_are_told_when_the_client_is_made() -> None:
    """And not in the middle of a request."""
    with pytest.raises(ValueError, match="rate must be a positive number"):
        tokenflow_client.http_client(rate=-3)


def test_headers() -> None:
    """All that is known, and nothing that is not."""
    reader = TokenFlowReader(rate=5.5, kind="voice", sla="gold", ttft_ms=300, delivery="paced")
    headers = reader.headers()
    assert find_reader(headers.pop(READER_ID)) is reader
    assert headers == {
        "X-TokenFlow-Reader": "voice",
        "X-TokenFlow-Rate": "5.5",
        "X-TokenFlow-SLA": "gold",
        "X-TokenFlow-TTFT-Ms": "300",
        "X-TokenFlow-Delivery": "paced",
    }
    assert TokenFlowReader().request_headers() == {"X-TokenFlow-Reader": "human"}


def test_headers_keep_their_reader() -> None:
    """``extra_headers=TokenFlowReader().headers()`` works; without the headers the reader is forgotten."""
    headers = TokenFlowReader().headers()
    reader_id = headers[READER_ID]
    assert find_reader(reader_id) is not None
    del headers
    assert find_reader(reader_id) is None


def test_evidence_fits_the_kind() -> None:
    assert [TokenFlowReader(kind=kind).evidence for kind in ("human", "voice", "machine")] == [
        "pull",
        "shown",
        "pull",
    ]


def test_pauses_nest_and_do_not_undo_the_button() -> None:
    reader = TokenFlowReader()
    with reader.paused():
        with reader.paused():
            reader.resume()
            assert reader.is_paused
        assert reader.is_paused
        reader.pause()
    assert reader.is_paused
    reader.resume()
    assert not reader.is_paused


def test_shown_never_goes_back_and_starts_again_with_an_answer() -> None:
    reader = TokenFlowReader(kind="voice")
    first = reader.begin(lambda: None)
    reader.shown(tokens=5)
    reader.shown(tokens=3)
    reader.shown(chars=20)
    assert not first.closed
    second = reader.begin(lambda: None)
    reader.shown(tokens=1)
    assert (first.tokens, first.chars, first.closed) == (5, 20, True)
    assert (second.tokens, second.chars, second.closed) == (1, 0, False)


def test_who_has_left_is_told_at_once_and_may_read_another_answer() -> None:
    reader, told = TokenFlowReader(kind="voice"), []
    shown = reader.begin(lambda: told.append(True))
    reader.close()
    assert shown.closed
    assert told
    assert not reader.begin(lambda: None).closed


def test_what_is_read_by_asking_is_not_ended_by_another_answer() -> None:
    """Two answers may be read at once where the position is each one's own."""
    reader = TokenFlowReader()
    first = reader.begin(lambda: None)
    reader.begin(lambda: None)
    assert not first.closed


@pytest.mark.parametrize("said", [{}, {"tokens": 1, "chars": 2}])
def test_shown_takes_one_of_the_two(said: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="either tokens or chars"):
        TokenFlowReader().shown(**said)


def test_what_is_exported_is_there() -> None:
    assert all(hasattr(tokenflow_client, name) for name in tokenflow_client.__all__)
    assert tokenflow_client.__all__ == sorted(tokenflow_client.__all__)
