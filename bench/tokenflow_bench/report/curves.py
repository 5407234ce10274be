"""Curves of one run's timeline (`timelines`), simulated or real: what any report draws of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tokenflow_bench.report.drawing import colour_of

__all__ = ["TOKENS", "UNREAD", "draw_buffers", "draw_tokens", "draw_ttft"]

TOKENS = (
    "Three streams: dots as tokens come, lines as they are read. A line that touches its dots is a "
    "reader who waits."
)
UNREAD = "Seconds of reading that lie ready: median and 10 to 90 % of the streams being read."


def draw_tokens(axis: Axes, timeline: Mapping[str, Any]) -> None:
    """`TOKENS` says what is seen."""
    for number, stream in enumerate(timeline["streams"]):
        colour = f"C{number}"
        label = ("comes", "is read") if not number else (None, None)
        axis.plot(stream["token_s"], stream["tokens"], ".", ms=2, color=colour, alpha=0.6, label=label[0])
        axis.plot(stream["read_s"], stream["tokens"], "-", lw=1, color=colour, label=label[1])
    axis.set_ylabel("tokens")


def draw_buffers(axis: Axes, timeline: Mapping[str, Any]) -> None:
    """`UNREAD` says what is seen."""
    buffers = timeline["buffers"]
    at, low, mid, high = (np.array(buffers[name], dtype=float) for name in ("at_s", "p10", "p50", "p90"))
    axis.fill_between(at, low, high, alpha=0.25, color="#00806a", lw=0, label="10-90 %")
    axis.plot(at, mid, color="#00806a", label="median")
    axis.set_ylabel("s of unread text")
    axis.set_yscale("symlog", linthresh=1.0)


def draw_ttft(axis: Axes, timeline: Mapping[str, Any], name: str) -> None:
    """Share of streams whose first token has come by then."""
    ttft = timeline["ttft_s"]
    axis.step(ttft, np.arange(1, len(ttft) + 1) / len(ttft), color=colour_of(name), label=name)
    axis.set(xlabel="TTFT, s", ylabel="share of streams", xscale="log")
