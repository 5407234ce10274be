"""Readers beyond their streams."""

from __future__ import annotations

import pytest

from tokenflow_gateway.readers import registry
from tokenflow_gateway.readers.estimator import Source
from tokenflow_gateway.readers.learned import LearnedRates
from tokenflow_gateway.readers.progress import ProgressReport
from tokenflow_gateway.readers.registry import GRACE_S, ReaderRegistry
from tokenflow_gateway.readers.tally import Look
from tokenflow_gateway.readers.track import ReaderTrack

WORDS = 2000


class Counted:
    """What the registry has counted."""

    def __init__(self) -> None:
        self.consumed: dict[Source, float] = {}
        self.stalls = 0

    def __call__(self, source: Source, look: Look) -> None:
        self.consumed[source] = self.consumed.get(source, 0.0) + look.consumed
        self.stalls += look.stalls


def readers(*, learn: bool = True) -> ReaderRegistry:
    return ReaderRegistry(learned=LearnedRates(key=b"key") if learn else None, count=Counted())


def begin(
    made: ReaderRegistry, user: str | None, *, tenant: str = "t", rate: float | None = None, now: float = 0.0
) -> ReaderTrack:
    track = made.opened(tenant=tenant, user=user, reader="human", declared_rate=rate, now=now)
    for _ in range(WORDS):
        track.content("word ")
    track.delivered([WORDS], [now])
    return track


def read(track: ReaderTrack, *, begin_s: float, seconds: float, rate: float) -> None:
    """Report four times a second, truthfully."""
    for tick in range(int(seconds * 4) + 1):
        position = rate * (begin_s + tick / 4)
        track.progress([ProgressReport(seq=int(position * 1000), tokens=position)], begin_s + tick / 4)


def test_the_next_stream_of_a_reader_begins_with_what_was_learned() -> None:
    made = readers()
    first = begin(made, "ann")
    assert first.estimate(0.0).source == "model"
    read(first, begin_s=0.0, seconds=30.0, rate=9.0)
    made.ended("tf-1", first, now=30.0)
    second = begin(made, "ann", now=31.0).estimate(31.0)
    average = begin(made, None).estimate(0.0)
    assert second.source == "learned"
    assert average.rate * 1.4 < second.rate < 9.0
    assert second.rate_high / second.rate_low < average.rate_high / average.rate_low


def test_others_begin_as_anyone() -> None:
    made = readers()
    first = begin(made, "ann")
    read(first, begin_s=0.0, seconds=30.0, rate=9.0)
    made.ended("tf-1", first, now=30.0)
    for other in (begin(made, "bob"), begin(made, "ann", tenant="u"), begin(made, None)):
        assert other.estimate(0.0).source == "model"
    assert begin(made, "ann", rate=3.0).estimate(0.0).source == "declared"


def test_what_the_client_says_now_is_stronger_than_what_was_learned() -> None:
    made = readers()
    first = begin(made, "ann")
    read(first, begin_s=0.0, seconds=30.0, rate=9.0)
    made.ended("tf-1", first, now=30.0)
    second = begin(made, "ann")
    read(second, begin_s=0.0, seconds=5.0, rate=2.0)
    assert second.estimate(5.0).source == "progress"
    assert second.estimate(5.0).rate == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, 4.0])
def test_a_glance_teaches_nothing(seconds: float) -> None:
    made = readers()
    first = begin(made, "ann")
    read(first, begin_s=0.0, seconds=seconds, rate=9.0)
    made.ended("tf-1", first, now=5.0)
    assert begin(made, "ann").estimate(0.0).source == "model"


def test_nothing_is_learned_from_words_alone() -> None:
    """Rates, pauses, and reports of a time before the stream."""
    made = readers()
    track = begin(made, "ann")
    lies = [ProgressReport(seq=n, tokens=0, rate=1000.0, paused=True) for n in range(30)]
    lies += [
        ProgressReport(seq=n, tokens=n * 5.0, rate=1000.0, age_ms=60_000 - n * 1000) for n in range(30, 60)
    ]
    track.progress(lies, 0.2)
    made.ended("tf-1", track, now=0.2)
    assert begin(made, "ann").estimate(0.0).source == "model"


def test_nothing_is_learned_where_that_is_switched_off() -> None:
    made = readers(learn=False)
    first = begin(made, "ann")
    read(first, begin_s=0.0, seconds=30.0, rate=9.0)
    made.ended("tf-1", first, now=30.0)
    assert first.name is None
    assert begin(made, "ann").estimate(0.0).source == "model"


def test_a_reader_may_teach_more_after_the_end() -> None:
    made = readers()
    track = begin(made, "ann")
    made.ended("tf-1", track, now=0.0)
    assert made.get("tf-1", now=1.0) is track
    read(track, begin_s=1.0, seconds=20.0, rate=9.0)
    made.learn(track, now=21.0)
    assert begin(made, "ann").estimate(0.0).source == "learned"


def test_evidence_counts_once() -> None:
    made = readers()
    track = begin(made, "ann")
    read(track, begin_s=0.0, seconds=30.0, rate=9.0)
    made.ended("tf-1", track, now=30.0)
    before = begin(made, "ann").estimate(0.0)
    made.learn(track, now=30.0)
    assert begin(made, "ann").estimate(0.0) == before


def test_the_grace_ends() -> None:
    made = readers()
    track = begin(made, None)
    made.ended("tf-1", track, now=10.0)
    assert made.get("tf-1", now=10.0 + GRACE_S - 0.1) is track
    assert made.get("tf-2", now=10.0) is None
    assert made.get("tf-1", now=10.0 + GRACE_S) is None
    assert len(made) == 0


def test_the_oldest_goes_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MOST_ENDED", 2)
    made = readers()
    for rid in ("tf-1", "tf-2", "tf-3"):
        made.ended(rid, begin(made, None), now=0.0)
    assert [made.get(rid, now=0.0) is None for rid in ("tf-1", "tf-2", "tf-3")] == [True, False, False]


def test_an_answer_without_text_takes_nobodys_place() -> None:
    made = readers()
    made.ended(
        "tf-1", made.opened(tenant="t", user=None, reader="human", declared_rate=None, now=0.0), now=0.0
    )
    assert len(made) == 0


def test_what_is_read_after_the_end_is_counted_by_the_end_of_the_grace() -> None:
    counted = Counted()
    made = ReaderRegistry(learned=None, count=counted)
    track = begin(made, None, rate=10.0)
    made.ended("tf-1", track, now=5.0)
    assert counted.consumed == {"declared": 50.0}
    made.expire(5.0 + GRACE_S)
    assert counted.consumed == {"declared": WORDS}
    assert counted.stalls == 0
