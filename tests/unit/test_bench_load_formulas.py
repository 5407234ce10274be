"""The metrics of one stream, each against a case worked out by hand."""

from __future__ import annotations

import pytest

from tokenflow_bench import formulas
from tokenflow_bench.load.reading import Person, Reading


def test_unread_counts_the_token_that_comes() -> None:
    """Tokens at 0, 0, 1, 2, read at 1, 2, 3, 4: at 1 the first has been read, at 2 the first two."""
    assert list(formulas.unread([0, 0, 1, 2], [1, 2, 3, 4])) == [1, 2, 2, 2]


@pytest.mark.parametrize(("share", "weight"), [(0.0, 1), (0.1, 1), (0.15, 0.5), (0.2, 0), (0.9, 0)])
def test_weight_falls_from_a_tenth_to_a_fifth(share: float, weight: float) -> None:
    assert formulas.token_weight(share) == pytest.approx(weight)


def test_effective_tokens_of_a_burst() -> None:
    """Twenty tokens at once: two within a tenth, the third at 15 %, the others beyond a fifth."""
    token_s = [0.0] * 20
    read_s = Reading.of(Person(1.0), token_s).read_s
    assert formulas.effective_tokens(token_s, read_s, output_tokens=20) == pytest.approx(2.5)


def test_effective_tokens_just_in_time() -> None:
    """All of them, if none comes before the one before it has been read."""
    token_s = [float(number) for number in range(20)]
    read_s = Reading.of(Person(1.0), token_s).read_s
    assert formulas.effective_tokens(token_s, read_s, output_tokens=20) == pytest.approx(20)


def test_quality_of_service() -> None:
    """(10 + 20 - (1 + 2) - (0 + 3)) / 4."""
    assert formulas.quality_of_service([10, 20], [1, 2], [0, 3], seconds=4) == pytest.approx(6)


def test_quality_of_experience_is_one_as_expected() -> None:
    assert formulas.quality_of_experience([2, 3, 4], expected_first_s=1, rate=1) == 1


def test_quality_of_experience_of_a_late_answer() -> None:
    """Expected at 2, 3, 4, read at 4, 5, 6: late by 6 of (6-2) + (6-3) + (6-4) = 9."""
    quality = formulas.quality_of_experience([4, 5, 6], expected_first_s=1, rate=1)
    assert quality == pytest.approx(1 - 6 / 9)


def test_quality_of_experience_of_no_answer() -> None:
    assert formulas.quality_of_experience([], expected_first_s=1, rate=1) == 0


def test_mean_lead() -> None:
    """Unread 1, 2, 2 and 2 at two tokens a second."""
    assert formulas.mean_lead_s([0, 0, 1, 2], [1, 2, 3, 4], rate=2) == pytest.approx(7 / 4 / 2)
