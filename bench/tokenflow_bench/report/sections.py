"""Sections as tables: every figure for the page, the few that tell the story for `docs/results.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenflow_bench.report.groups import places_of
from tokenflow_bench.tables import Table, spread

__all__ = ["short_table", "whole_table"]

_SHORT = {
    "ttft_mean_s": ("TTFT mean, s", 2),
    "ttft_p99_s": ("TTFT P99, s", 2),
    "wait_mean_s": ("wait mean, s", 2),
    "stall_free_share": ("stall-free", 2),
    "raw_tokens_per_s": ("raw, tok/s", 0),
    "effective_tokens_per_s": ("effective", 0),
}
_WHOLE = {
    "ttft_mean_s": ("TTFT mean, s", 2),
    "ttft_p50_s": ("TTFT P50", 2),
    "ttft_p99_s": ("TTFT P99", 2),
    "wait_mean_s": ("wait mean, s", 2),
    "wait_p99_s": ("wait P99", 2),
    "stall_mean_s": ("stall mean, s", 2),
    "stall_free_share": ("stall-free", 3),
    "good_share": ("good", 3),
    "tbt_p99_s": ("TBT P99, s", 3),
    "raw_tokens_per_s": ("raw, tok/s", 0),
    "consumed_tokens_per_s": ("consumed", 0),
    "effective_tokens_per_s": ("effective", 0),
    "effective_capped_tokens_per_s": ("effective, capped", 0),
    "qos": ("QoS", 0),
    "qoe_mean": ("QoE", 3),
    "fairness": ("fairness", 3),
    "worst_class_good_share": ("worst class good", 3),
    "preemptions": ("preemptions", 2),
    "gigabytes": ("GB moved", 0),
    "retractions": ("dropped", 0),
}


def whole_table(document: Mapping[str, Any], section: Mapping[str, Any]) -> Table:
    """All figures: medians over seeds, and their range."""
    return _table(document, section, _WHOLE)


def short_table(document: Mapping[str, Any], section: Mapping[str, Any]) -> Table:
    """The story."""
    return _table(document, section, _SHORT)


def _table(
    document: Mapping[str, Any], section: Mapping[str, Any], columns: Mapping[str, tuple[str, int]]
) -> Table:
    rows = []
    for place in places_of(document, section):
        named = place.name
        for policy in place.cases:
            cells = [spread(place.figure(policy, name), digits) for name, (_, digits) in columns.items()]
            rows.append([named, policy, *cells])
            named = ""
    return Table(["", "policy", *(title for title, _ in columns.values())], rows)
