"""Two engines in turns: the ratios of pairs, and what is shown of them."""

from __future__ import annotations

import pytest

from tokenflow_bench.burst.idle import COMPARED, ratios, table_of


def shown(tokens_per_s: float, ttft_s: float) -> dict[str, float]:
    return {"tokens_per_s": tokens_per_s, "ttft_mean_s": ttft_s}


def test_each_pair_gives_a_ratio_so_that_a_slow_minute_does_not_matter():
    first = [shown(100.0, 0.2), shown(50.0, 0.4)]
    second = [shown(99.0, 0.202), shown(49.5, 0.404)]
    found = ratios(first, second)
    assert found["tokens_per_s"] == pytest.approx([0.99, 0.99])
    assert found["ttft_mean_s"] == pytest.approx([1.01, 1.01])
    with pytest.raises(ValueError, match="shorter"):
        ratios(first, second[:1])


def test_the_table_has_median_and_spread():
    first, second = [shown(100.0, 0.2)] * 3, [shown(rate, 0.2) for rate in (98.0, 99.0, 103.0)]
    table = {
        "setup": "tiny",
        "title": "nobody waits",
        "sides": ["stock", "plugin"],
        "figures": {"stock": first, "plugin": second},
        "ratios": ratios(first, second),
        "idle_cores": {"stock": [0.005, 0.015], "plugin": [0.01, 0.03]},
        "alone_s": {"stock": [0.010, 0.020, 0.030], "plugin": [0.011, 0.021, 0.033]},
    }
    text = table_of([table]).text()
    assert "tiny, nobody waits: plugin / stock  3 " in text
    assert "x0.990 (0.980 to 1.030)" in text
    assert "x1.100 (1.050 to 1.100); 21.00 / 20.00 ms, 3 pairs" in text
    assert "2.0 % / 1.0 %" in text


def test_only_the_second_engine_of_the_first_comparison_has_the_plugin():
    first = COMPARED[0]
    assert first.first_env["TOKENFLOW_PLUGIN"] == "off"
    assert "TOKENFLOW_PLUGIN" not in {**first.env, **first.second_env}
