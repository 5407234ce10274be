"""Effective tokens from a few looks a second, beside the formula that sees each token."""

from __future__ import annotations

import numpy as np
import pytest

from tokenflow_bench.formulas import effective_tokens
from tokenflow_gateway.readers.leads import Leads

LOOK_S = 0.25


def looked_at(token_s: np.ndarray, read_s: np.ndarray) -> float:
    """What `Leads` makes of an answer whose tokens come and are read at these times."""
    leads, n = Leads(), len(token_s)
    for now in np.arange(0.0, max(token_s[-1], read_s[-1]) + LOOK_S, LOOK_S):
        leads.look(int(np.searchsorted(token_s, now, "right")), float(np.searchsorted(read_s, now, "right")))
    assert n == int(np.searchsorted(token_s, now, "right"))
    return leads.effective_tokens()


@pytest.mark.parametrize("generated_per_s", [4.0, 5.5, 8.0, 30.0, 200.0])
def test_it_is_the_papers_sum_to_a_few_percent(generated_per_s: float) -> None:
    """A reader of five tokens a second, from an engine slower than that to one much faster."""
    n, rate = 400, 5.0
    token_s = np.arange(1, n + 1) / generated_per_s
    read_s = np.maximum.accumulate(np.maximum(token_s, token_s[0] + np.arange(n) / rate))
    exact = effective_tokens(token_s, read_s, output_tokens=n)
    assert looked_at(token_s, read_s) == pytest.approx(exact, abs=0.03 * n)


def test_who_reads_at_once_has_all_tokens_count() -> None:
    leads = Leads()
    for come in range(1, 100):
        leads.look(come, float(come))
    assert leads.effective_tokens() == 99


def test_an_answer_that_comes_all_at_once() -> None:
    """Token j finds j unread: the first ten of a hundred weigh 1, the next ten half of that on average."""
    leads = Leads()
    leads.look(100, 0.0)
    assert leads.effective_tokens() == pytest.approx(15.0)


def test_who_reads_nothing_has_the_first_tokens_count() -> None:
    leads = Leads()
    for come in range(1, 101):
        leads.look(come, 0.0)
    assert leads.effective_tokens() == pytest.approx(15.0, abs=1.0)


def test_an_answer_without_tokens_is_worth_nothing() -> None:
    leads = Leads()
    leads.look(0, 0.0)
    assert leads.effective_tokens() == 0
