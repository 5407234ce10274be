"""What a request is expected to take of its tenant's limits."""

from __future__ import annotations

import tracemalloc
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
        (['"', 'a "b"', "c"], 3),
        (["ends in a \\"], 1),
        ([""], 1),
        ([[]], 1),
        ({"not": "a prompt"}, 1),
    ],
)
def test_each_of_several_prompts_has_an_answer(prompt: object, texts: int) -> None:
    assert of(prompt=prompt, max_tokens=100).output == 100 * texts
    assert of(prompt=prompt, max_tokens=100, n=2).output == 200 * texts


@pytest.mark.parametrize(("element", "texts"), [(b"1", 1), (b'""', 500_000), (b"[]", 500_000)])
def test_of_a_long_list_no_more_is_made_than_one_copy(element: bytes, texts: int) -> None:
    body = b" [ " + b" , ".join([element] * 500_000) + b"]"
    parsed = msgspec.json.decode(b'{"prompt":' + body + b',"max_tokens":1}', type=dict[str, msgspec.Raw])
    tracemalloc.start()
    try:
        made = estimate(parsed, assumed_output=512, most_output=4096)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * len(body)
    finally:
        tracemalloc.stop()
    assert made.output == texts


def test_an_answer_that_is_the_best_of_several_costs_all_of_them() -> None:
    assert of(prompt="hello", max_tokens=100, best_of=5).output == 500
    assert of(prompt="hello", max_tokens=100, n=2, best_of=5).output == 500
    assert of(prompt="hello", max_tokens=100, n=2, best_of=None).output == 200
