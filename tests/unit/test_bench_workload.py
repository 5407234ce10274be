"""What arrives, and who reads: drawn by a seed, with the shapes that are claimed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tokenflow_bench.people import Pauses, Scanning, listening_rates, lognormal_rates, mixed_rates
from tokenflow_bench.reading import Person
from tokenflow_bench.sla import Sla, parse_sla
from tokenflow_bench.workload import (
    Workload,
    burst_arrivals,
    gamma_arrivals,
    lognormal_lengths,
    normal_lengths,
    poisson_arrivals,
    sharegpt_lengths,
)

MANY = 40_000


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def workload(count: int = 4) -> Workload:
    return Workload.of(np.arange(float(count)), np.full(count, 10), np.full(count, 20), np.full(count, 5.0))


def test_arrivals_have_their_rate_and_their_burstiness() -> None:
    """Deviation over mean of the times between: 0, 1, and 1 / sqrt(0.5) (BurstGPT's shape), 2 for 0.25."""
    assert burst_arrivals(3).tolist() == [0, 0, 0]
    poisson = np.diff(poisson_arrivals(rng(), MANY, per_s=4.0))
    gamma = np.diff(gamma_arrivals(rng(), MANY, per_s=4.0))
    burstier = np.diff(gamma_arrivals(rng(), MANY, per_s=4.0, shape=0.25))
    for gaps, deviation in ((poisson, 1.0), (gamma, math.sqrt(2.0)), (burstier, 2.0)):
        assert gaps.mean() == pytest.approx(0.25, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(deviation, rel=0.05)


def test_lengths_have_their_mean_and_spread() -> None:
    normal = normal_lengths(rng(), MANY, mean=500)
    assert (normal.mean(), normal.std() / normal.mean()) == pytest.approx((500, 0.25), rel=0.02)
    lognormal = lognormal_lengths(rng(), MANY, mean=500, sigma=0.9)
    assert lognormal.mean() == pytest.approx(500, rel=0.05)
    assert np.log(lognormal).std() == pytest.approx(0.9, rel=0.02)
    assert np.median(lognormal) < 0.75 * lognormal.mean(), "many short ones"
    assert normal_lengths(rng(), 1000, mean=1).min() >= 1
    prompt, output = sharegpt_lengths(rng(), MANY, most=100_000)
    assert (prompt.mean(), output.mean()) == pytest.approx((161.31, 337.99), rel=0.05)
    assert sharegpt_lengths(rng(), MANY, most=300)[1].max() == 300


def test_rates() -> None:
    """English: median 5.3, and most between 3.9 and 6.7; speech is slower and varies less."""
    read, heard = lognormal_rates(rng(), MANY), listening_rates(rng(), MANY)
    assert np.median(read) == pytest.approx(5.3, rel=0.02)
    assert 0.6 < ((read > 3.9) & (read < 6.7)).mean() < 0.8
    assert np.median(heard) == pytest.approx(4.1, rel=0.02)
    assert np.log(heard).std() < np.log(read).std()
    mixed = mixed_rates(rng(), MANY, shares={15.0: 0.4, 20.0: 0.6})
    assert (mixed == 15.0).mean() == pytest.approx(0.4, abs=0.02)


def test_three_states_have_their_shares() -> None:
    """12 s of reading between stays that are 2 s of scanning or 4 s of pausing: 2 of 15 s are pauses."""
    spans = np.array(Scanning().spans(rng(), until_s=200_000.0))
    seconds, factors = spans.T
    assert factors[::2].tolist() == [1.0] * (len(spans) // 2), "reading comes between"
    shares = {factor: seconds[factors == factor].sum() / seconds.sum() for factor in (0.0, 1.0, 3.0)}
    assert shares == pytest.approx({0.0: 2 / 15, 1.0: 12 / 15, 3.0: 1 / 15}, rel=0.05)
    stays = seconds[factors == 1.0]
    assert stays.std() / stays.mean() == pytest.approx(1.0, rel=0.05), "exponential, so without memory"


@pytest.mark.parametrize("schedule", [Pauses(every_s=8.0, last_s=3.0), Scanning()])
def test_schedules_are_drawn_by_the_seed(schedule: Pauses | Scanning) -> None:
    one, same, other = (workload().with_pauses(schedule, rng(seed)) for seed in (1, 1, 2))
    assert one.spans == same.spans != other.spans
    assert len({one.spans[row] for row in range(4)}) == 4
    assert one.person(2) == Person(5.0, one.spans[2])


def test_pauses_as_spans_are_where_they_were_drawn() -> None:
    pauses = Pauses(every_s=8.0, last_s=3.0)
    drawn = pauses.of_one(rng(), until_s=60.0)
    person = Person(5.0, pauses.spans(rng(), until_s=60.0))
    assert np.array(person.pauses()) == pytest.approx(np.array(drawn))


def test_machines_take_all() -> None:
    everybody = workload(2000).with_machines(0.3, rng())
    assert everybody.machine.mean() == pytest.approx(0.3, abs=0.05)
    assert replace(workload(), machine=np.array([True, False, False, False])).person(0).is_machine


def test_classes() -> None:
    mix = [parse_sla("premium:1,weight=4,ttft=0.5,rate=8,park=no"), parse_sla("economy:3,ttft=5")]
    work = workload(2000).with_classes(mix, rng())
    premium = work.sla == 0
    assert premium.mean() == pytest.approx(0.25, abs=0.04)
    assert {work.class_of(row).name for row in np.flatnonzero(premium)} == {"premium"}
    assert set(work.weight[premium]) == {4.0}
    assert set(work.weight[~premium]) == {1.0}
    assert set(work.ttft_target[premium]) == {0.5}
    assert set(work.rate[premium]) == {8.0}
    assert set(work.rate[~premium]) == {5.0}, "as it was drawn"
    assert not work.may_park[premium].any()
    assert work.may_park[~premium].all()


def test_without_a_mix_there_is_one_class() -> None:
    work = Workload.of(np.zeros(2), np.ones(2, int), np.ones(2, int), np.ones(2), ttft_target_s=3.0)
    assert [work.class_of(row) for row in range(2)] == [Sla(name="all", ttft_target_s=3.0)] * 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("premium", "could not convert"),
        ("premium:0", "share must be more than 0"),
        ("premium:1,weight=-2", "weight must be more than 0"),
        ("premium:1,speed=2", "'speed=2' is none of weight=, ttft=, rate=, park="),
        ("premium:1,park=maybe", "park is yes or no"),
        (":1", "a class needs a name"),
        ("two words:1", "a class needs a name"),
        ("premium:nan", "share must be more than 0"),
    ],
)
def test_classes_that_mean_nothing(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_sla(text)
