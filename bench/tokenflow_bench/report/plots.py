"""Plots of a result, each as PNG with the words that belong beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.style import context

from tokenflow_bench.report.curves import TOKENS, UNREAD, draw_buffers, draw_tokens, draw_ttft
from tokenflow_bench.report.drawing import STYLE, Plot, as_plot, colour_of, grid
from tokenflow_bench.report.groups import Place, command_of, places_of, sections_of

__all__ = ["Plot", "plots_of"]


def plots_of(document: Mapping[str, Any]) -> list[Plot]:
    """All that this result has the data for."""
    with context(dict(STYLE)):
        return [plot for section in sections_of(document) for plot in _of(document, section)]


def _of(document: Mapping[str, Any], section: Mapping[str, Any]) -> Iterator[Plot]:
    places = places_of(document, section)
    made = f"Seeds {', '.join(map(str, document['seeds']))}; `{command_of(document, section)}`."
    drawn = [place for place in places if all("timeline" in case[0] for case in place.cases.values())]
    for place in drawn:
        seed = next(iter(place.cases.values()))[0]["seed"]
        at = f"{place.name}, seed {seed}; `{command_of(document, section)}`."
        stem = f"{place.setup}-{place.load:g}" if place.load is not None else place.setup
        yield from _timelines(place, stem, at)
    if section["name"] == "load":
        yield _sweep(places, made)
        yield _pareto(places, made)
    if section["name"] == "ablation":
        yield _ablation([place for place in places if "stock" in place.cases], made)


def _timelines(place: Place, stem: str, made: str) -> Iterator[Plot]:
    yield _panels(
        place,
        f"tokens-{stem}",
        "Tokens against the reading line",
        f"{TOKENS} {made}",
        draw_tokens,
    )
    yield _panels(
        place,
        f"buffers-{stem}",
        "Unread text over time",
        f"{UNREAD} {made}",
        draw_buffers,
    )
    yield _panels(
        place,
        f"engine-{stem}",
        "Streams in the engine",
        f"Running, preempted, waiting. {made}",
        _draw_engine,
    )
    figure, axes = _figure(1)
    for policy, cases in place.cases.items():
        draw_ttft(axes[0], cases[0]["timeline"], policy)
    axes[0].legend()
    yield as_plot(figure, f"ttft-{stem}", "Time to first token", f"Cumulative. {made}")


def _panels(
    place: Place, name: str, title: str, words: str, draw: Callable[[Axes, Mapping[str, Any]], None]
) -> Plot:
    figure, axes = _figure(len(place.cases))
    for axis, (policy, cases) in zip(axes, place.cases.items(), strict=True):
        draw(axis, cases[0]["timeline"])
        axis.set(title=policy, xlabel="s")
    axes[0].legend()
    return as_plot(figure, name, title, words)


def _draw_engine(axis: Axes, timeline: Mapping[str, Any]) -> None:
    engine = timeline["engine"]
    names = ("running", "preempted", "waiting")
    colours = ("#00806a", "#e0a800", "#c0392b")
    axis.stackplot(
        engine["at_s"], *(engine[name] for name in names), labels=names, colors=colours, alpha=0.75
    )
    axis.set_ylabel("streams")


def _sweep(places: Sequence[Place], made: str) -> Plot:
    setups = list(dict.fromkeys(place.setup for place in places))
    figure, table = grid(2, len(setups))
    for column, setup in enumerate(setups):
        mine = [place for place in places if place.setup == setup]
        for policy in (policy for policy in mine[0].cases if policy != "bound"):
            loads = [place.load for place in mine]
            for axis, name in zip(table[:, column], ("wait_p99_s", "stall_free_share"), strict=True):
                values = [place.figure(policy, name).median for place in mine]
                axis.plot(loads, values, "o-", ms=3, color=colour_of(policy), label=policy)
        table[0, column].set(title=setup, yscale="log", ylabel="wait P99, s" if not column else "")
        table[1, column].set(xlabel="load", ylim=(0, 1.05), ylabel="stall-free" if not column else "")
    table[0, 0].legend(fontsize=7)
    return as_plot(figure, "load", "Load", f"Wait = TTFT + stall. Medians over seeds. {made}")


def _pareto(places: Sequence[Place], made: str) -> Plot:
    figure, axes = _figure(1)
    for place in places:
        for policy in (policy for policy in place.cases if policy != "bound"):
            ttft, stall = (
                place.figure(policy, "ttft_mean_s").median,
                place.figure(policy, "stall_mean_s").median,
            )
            if ttft is None or stall is None:
                continue
            axes[0].plot(max(ttft, 0.01), max(stall, 0.001), "o", ms=4, alpha=0.7, color=colour_of(policy))
    for policy in places[0].cases:
        if policy != "bound":
            axes[0].plot([], [], "o", ms=4, color=colour_of(policy), label=policy)
    axes[0].set(xscale="log", yscale="log", xlabel="TTFT mean, s", ylabel="stall mean, s (0.001: none)")
    axes[0].legend()
    return as_plot(
        figure,
        "pareto",
        "First token against stalls",
        f"Each dot a set-up at a load; lower left is better. {made}",
    )


def _ablation(places: Sequence[Place], made: str) -> Plot:
    figure, table = grid(3, len(places))
    figures = (
        ("makespan_s", "completion, s"),
        ("wait_mean_s", "wait mean, s"),
        ("stall_free_share", "stall-free"),
    )
    for column, place in enumerate(places):
        policies = list(place.cases)
        words = ["adaptive, no gate" if "efficiency" in policy else policy for policy in policies]
        for axis, (name, title) in zip(table[:, column], figures, strict=True):
            values = [place.figure(policy, name).median or 0.0 for policy in policies]
            axis.bar(words, values, color=[colour_of(policy) for policy in policies])
            axis.set_ylabel(title if not column else "")
            axis.tick_params(axis="x", rotation=90, labelbottom=axis is table[-1, column])
        table[0, column].set_title(place.name)
    return as_plot(figure, "ablation", "Ablation", f"Medians over seeds. {made}")


def _figure(panels: int) -> tuple[Figure, Sequence[Axes]]:
    figure, table = grid(1, panels)
    return figure, list(table[0])
