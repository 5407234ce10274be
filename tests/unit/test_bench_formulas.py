"""The formulas behind the metrics, each against a case worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tokenflow_bench import formulas
from tokenflow_bench.reading import Person, read_times

AT_ONCE = np.zeros(20)
JUST_IN_TIME = np.arange(20.0)


def test_time_between_tokens() -> None:
    """Three gaps in three seconds, however they are spread."""
    assert formulas.mean_time_between_tokens(np.array([1.0, 1.0, 3.5, 4.0])) == pytest.approx(1.0)
    assert formulas.mean_time_between_tokens(np.array([1.0])) is None


def test_unread_counts_the_token_that_comes() -> None:
    """Tokens at 0, 0, 1, 2, read at 1, 2, 3, 4: at 1 the first has been read, at 2 the first two."""
    assert formulas.unread(np.array([0.0, 0, 1, 2]), np.array([1.0, 2, 3, 4])).tolist() == [1, 2, 2, 2]


def test_what_a_machine_takes_at_once_is_unread_as_it_comes() -> None:
    assert formulas.unread(np.array([1.0, 2, 2]), np.array([1.0, 2, 2])).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("share", "weight"), [(0.0, 1), (0.1, 1), (0.15, 0.5), (0.2, 0), (0.9, 0)])
def test_weight_falls_from_a_tenth_to_a_fifth(share: float, weight: float) -> None:
    assert formulas.token_weight(np.array([share])) == pytest.approx([weight])


def test_effective_tokens_of_a_burst() -> None:
    """Twenty tokens at once: two within a tenth, the third at 15 %, the others beyond a fifth."""
    read_s = read_times(Person(1.0), AT_ONCE)
    assert formulas.effective_tokens(AT_ONCE, read_s, output_tokens=20) == pytest.approx(2.5)


def test_effective_tokens_just_in_time() -> None:
    """All of them, if none comes before the one before it has been read."""
    read_s = read_times(Person(1.0), JUST_IN_TIME)
    assert formulas.effective_tokens(JUST_IN_TIME, read_s, output_tokens=20) == pytest.approx(20)


def test_capped_leads() -> None:
    """A tenth of twenty may be unread: the third waits until the first is read (at 1), the last until 18."""
    read_s = read_times(Person(1.0), AT_ONCE)
    capped = formulas.capped_token_s(AT_ONCE, read_s, output_tokens=20)
    assert capped.tolist() == [0.0, 0.0, *range(1, 19)]
    assert formulas.unread(capped, read_s).max() == 2
    assert read_times(Person(1.0), capped).tolist() == read_s.tolist(), "nobody reads later"


def test_capped_leads_change_nothing_for_text_just_in_time() -> None:
    read_s = read_times(Person(1.0), JUST_IN_TIME)
    capped = formulas.capped_token_s(JUST_IN_TIME, read_s, output_tokens=20)
    assert capped.tolist() == JUST_IN_TIME.tolist()


def test_quality_of_service() -> None:
    """(10 + 20 - (1 + 2) - (0 + 3)) / 4."""
    assert formulas.quality_of_service([10, 20], [1, 2], [0, 3], seconds=4) == pytest.approx(6)


def test_quality_of_experience_is_one_as_expected() -> None:
    assert formulas.quality_of_experience(np.array([2.0, 3, 4]), expected_first_s=1, rate=1) == 1


def test_quality_of_experience_of_a_late_answer() -> None:
    """Expected at 2, 3, 4, read at 4, 5, 6: late by 6 of (6-2) + (6-3) + (6-4) = 9."""
    quality = formulas.quality_of_experience(np.array([4.0, 5, 6]), expected_first_s=1, rate=1)
    assert quality == pytest.approx(1 - 6 / 9)


def test_quality_of_experience_of_no_answer() -> None:
    assert formulas.quality_of_experience(np.empty(0), expected_first_s=1, rate=1) == 0


def test_mean_lead() -> None:
    """Unread 1, 2, 2 and 2 at two tokens a second."""
    came, read_s = np.array([0.0, 0, 1, 2]), np.array([1.0, 2, 3, 4])
    assert formulas.mean_lead_s(came, read_s, rate=2) == pytest.approx(7 / 4 / 2)
    assert formulas.mean_lead_s(came, came, rate=math.inf) == 0


@pytest.mark.parametrize(
    ("values", "index"), [([3.0, 3.0], 1.0), ([1.0, 0.0], 0.5), ([1.0, 3.0], 16 / 20), ([0.0, 0.0], 1.0)]
)
def test_fairness(values: list[float], index: float) -> None:
    """(1 + 3)^2 / (2 (1 + 9)); one of two has everything: a half."""
    assert formulas.fairness(values) == pytest.approx(index)


def test_fairness_of_nobody() -> None:
    assert math.isnan(formulas.fairness([]))
