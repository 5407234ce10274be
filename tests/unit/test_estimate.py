"""What a request is expected to take of its tenant's limits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenflow_gateway.tenants.estimate import Estimate, estimate


def of(**fields: Any) -> Estimate:
    parsed = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    return estimate(parsed, assumed_output=512, most_output=4096)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hello", 1),
        (["hello"], 1),
        (["a", "b", "c"], 3),
        ([[1, 2], [3, 4]], 2),
        ([1, 2, 3, 4], 1),
        ([], 1),
        ({"not": "a prompt"}, 1),
    ],
)
def test_each_of_several_prompts_has_an_answer(prompt: object, texts: int) -> None:
    assert of(prompt=prompt, max_tokens=100).output == 100 * texts
    assert of(prompt=prompt, max_tokens=100, n=2).output == 200 * texts


def test_an_answer_that_is_the_best_of_several_costs_all_of_them() -> None:
    assert of(prompt="hello", max_tokens=100, best_of=5).output == 500
    assert of(prompt="hello", max_tokens=100, n=2, best_of=5).output == 500
    assert of(prompt="hello", max_tokens=100, n=2, best_of=None).output == 200
