"""The figures of a run as tables for a terminal."""

from __future__ import annotations

from tokenflow_bench.load.driver import Drive
from tokenflow_bench.load.summary import LoadSummary
from tokenflow_bench.metrics import Summary
from tokenflow_bench.tables import Table, number

__all__ = ["show"]

_MOST_ERRORS = 5


def show(summary: LoadSummary, run: Drive) -> str:
    """The whole set; classes in a table of their own if there are several."""
    figures = summary.figures
    rows = [*_waits(figures), *_throughput(figures), *_driver(run)]
    errors: dict[str, int] = {}
    for log in run.logs:
        if log.error:
            errors[log.error] = errors.get(log.error, 0) + 1
    most = sorted(errors, key=lambda error: -errors[error])[:_MOST_ERRORS]
    rows += [[f"error, {errors[error]} times", error] for error in most]
    parts = [Table(["", ""], rows).text()]
    if len(figures.classes) > 1:
        parts.append(_classes(figures).text())
    return "\n\n".join(parts)


def _waits(figures: Summary) -> list[list[str]]:
    seconds = [
        ("time to first token, mean, s", figures.ttft_mean_s),
        ("p50", figures.ttft_p50_s),
        ("p99", figures.ttft_p99_s),
        ("time between tokens, mean, s", figures.tbt_mean_s),
        ("p99", figures.tbt_p99_s),
        ("stall, mean, s", figures.stall_mean_s),
        ("wait (TTFT + stall), mean, s", figures.wait_mean_s),
        ("p99", figures.wait_p99_s),
    ]
    shares = [
        ("stall-free, %", figures.stall_free_share),
        ("good, %", figures.good_share),
        ("SLO kept (TTFT and pace), %", figures.slo_share),
    ]
    return [
        ["streams, and whole answers", f"{figures.streams}, {figures.whole}"],
        *([words, number(value, 3 if "between" in words else 2)] for words, value in seconds),
        ["stalls over 0.3 s, a stream", number(figures.stalls_mean, 2)],
        *([words, number(100 * value)] for words, value in shares),
    ]


def _throughput(figures: Summary) -> list[list[str]]:
    rates = [
        ("tokens per second (raw)", figures.raw_tokens_per_s),
        ("read by people, per second", figures.consumed_tokens_per_s),
        ("effective (paper), per second", figures.effective_tokens_per_s),
        ("effective with leads capped", figures.effective_capped_tokens_per_s),
        ("QoS (paper), per second", figures.qos),
    ]
    return [
        *([words, number(value, 1)] for words, value in rates),
        ["QoE (Andes), mean", number(figures.qoe_mean, 3)],
        ["text ready (lead), mean, s", number(figures.lead_mean_s, 2)],
        ["fairness between classes (Jain)", number(figures.fairness, 3)],
    ]


def _driver(run: Drive) -> list[list[str]]:
    return [
        ["driver: lag p99, ms", number(run.overhead.lag_p99_ms, 1)],
        ["driver: CPU, % of a core", number(100 * run.overhead.cpu_share)],
        ["driver: late for a request, p99, ms", number(run.overhead.late_p99_ms, 1)],
    ]


def _classes(figures: Summary) -> Table:
    head = [
        "class",
        "streams",
        "TTFT mean, s",
        "p99",
        "wait mean, s",
        "p99",
        "stall-free, %",
        "good, %",
        "SLO, %",
        "QoE",
    ]
    rows = [
        [
            name,
            str(one.streams),
            number(one.ttft_mean_s, 2),
            number(one.ttft_p99_s, 2),
            number(one.wait_mean_s, 2),
            number(one.wait_p99_s, 2),
            number(100 * one.stall_free_share),
            number(100 * one.good_share),
            number(100 * one.slo_share),
            number(one.qoe_mean, 3),
        ]
        for name, one in figures.classes.items()
    ]
    return Table(head, rows)
