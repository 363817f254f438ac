"""Draw the papers' figures: pure functions from plain data to matplotlib figures.

Each names its axes with their units, and says below how many points and seeds it shows. Numbers in
the names are those of the papers: ARPO (arXiv 2507.19849), GAGPO (2605.13217).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flows.tracking.calls_to_success import WINDOW, Curve, smoothed
from flows.tracking.run_figures import (
    DASHES,
    GREY,
    INK,
    LINES,
    POINTS,
    _figure,
    _legend,
    _tidy,
    _whole_numbers,
    need_columns,
)
from tasks.comparison.figure_data import EDGES
from tasks.trees.profiles import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURES = {  # of a curve: how the axis is called, and by what values are multiplied
    "success": ("success of rollouts in training (%)", 100.0),
    "episode_steps": ("environment steps an episode", 1.0),
    "gradient_norm": ("gradient norm", 1.0),
    "entropy": ("token entropy / ln |V|", 1.0),
    "advantage_spread": ("standard deviation\nof advantages", 1.0),
    "advantage_interquartile_range": ("interquartile range\nof advantages", 1.0),
    "advantage_share_above_1": ("advantages with |A| > 1 (%)", 100.0),
    "advantage_min": ("smallest advantage", 1.0),
    "advantage_max": ("largest advantage", 1.0),
}
DYNAMICS = tuple(MEASURES)[2:]  # GAGPO, figure 4
OF_RUN = {  # name -> measures, what they are drawn against, title
    "success_by_calls": (("success",), "tool_calls", "Success against tool calls"),
    "episode_length": (("episode_steps",), "iteration", "Length of episodes"),
    "dynamics": (DYNAMICS, "iteration", "Training dynamics"),
}
SPENT = {
    "tool_calls": "executed tool calls spent in training",
    "environment_steps": "environment steps spent in training",
    "sampled_tokens": "tokens sampled in training",
    "iteration": "updates (iterations)",
}


def entropy_by_tool(profiles: Mapping[str, Profile], seeds: int, when: str) -> Figure:
    """Draw token entropy by position around tool results, a line for each tool (ARPO 2).

    ``profiles``: tool -> columns of tasks/trees/profiles.py; ``when``: the iterations they are of.
    """
    _need(profiles, "entropy by tool: no result has profiles around tool results")
    figure = _figure(7.0, 4.4)
    axes = figure.subplots()
    for number, (tool, profile) in enumerate(profiles.items()):
        position, mean, error = (
            np.array(profile[name]) for name in ("position", "mean", "standard_error")
        )
        for side, label in ((position < 0, "_"), (position > 0, tool)):
            look: dict[str, Any] = {"color": LINES[number % len(LINES)], "linewidth": 2}
            axes.plot(position[side], mean[side], marker=".", label=label, **look)
            low, high = (mean - error)[side], (mean + error)[side]
            axes.fill_between(position[side], low, high, color=look["color"], alpha=0.2, lw=0)
    axes.axvline(0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlabel="sampled token, counted from the tool result", ylabel="mean entropy / ln |V|")
    axes.set_ylim(bottom=0)
    _whole_numbers(axes)
    _tidy(axes, "Token entropy around tool results")
    _legend(axes)
    tokens = ", ".join(
        f"{tool}: {sum(profile['tokens']):,.0f} tokens at {len(profile['position'])} positions"
        for tool, profile in profiles.items()
    )
    return _noted(figure, f"{when}; {tokens}; {_seeds(seeds)}; band: ± 1 standard error")


def of_run(curve: Curve) -> dict[str, Figure]:
    """Draw what a run's curve has of the papers' figures: name -> figure.

    ``curve``: measure -> a value an iteration, NaN for gaps, with what was spent so far (SPENT).
    """
    every = {"": [curve]}
    return {
        name: curves_by(every, measures, spent, title)
        for name, (measures, spent, title) in OF_RUN.items()
        if any(_has(curve, measure) for measure in measures) and _has(curve, spent)
    }


def curves_by(
    curves: Mapping[str, Sequence[Curve]], measures: Sequence[str], spent: str, title: str
) -> Figure:
    """Draw measures against what was spent, a panel each, a line for each variant.

    ``curves``: variant -> a curve a seed: measure -> a value an iteration. Values are means of the
    last WINDOW iterations. A line is the mean over seeds between the positions that all of them
    have; the band goes from the lowest to the highest seed. ARPO 7: success by tool calls; GAGPO
    2: success, 3: episode length, 4: DYNAMICS, all by updates.
    """
    shown = [name for name in measures if any(_has(curve, name) for curve in _all(curves))]
    _need(shown, f"{title}: no result has {list(measures)}")
    rows, columns = -(-len(shown) // 2), min(2, len(shown))
    below = -(-len(curves) // 3)
    figure = _figure(4.6 * columns + (2.4 if columns == 1 else 0), 2.7 * rows + 1.2)
    figure.set_figheight(2.7 * rows + 1.2 + 0.22 * below)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for name, axes in zip(shown, grid, strict=False):
        for number, (variant, seeds) in enumerate(curves.items()):
            curves_of_variant = [curve for curve in seeds if _has(curve, name)]
            look = {
                "color": LINES[number % len(LINES)],
                "linestyle": DASHES[number // len(LINES) % len(DASHES)],
            }
            if curves_of_variant:
                _mean_of_seeds(axes, curves_of_variant, name, spent, variant, look)
        axes.set(xlabel=SPENT[spent], ylabel=MEASURES[name][0])
        _tidy(axes)
    for axes in grid[len(shown) :]:
        axes.remove()
    figure.suptitle(title, x=0.01, ha="left", weight="bold", color=INK, size=11)
    if len(curves) > 1:
        handles, labels = grid[0].get_legend_handles_labels()
        _legend(figure, handles=handles, labels=labels, loc="outside upper center", ncols=3)
    note = f"means of {WINDOW} iterations; {_points(curves)}; band: lowest to highest seed"
    return _noted(figure, note)


def _mean_of_seeds(
    axes: Axes,
    curves: Sequence[Curve],
    measure: str,
    spent: str,
    label: str,
    look: Mapping[str, Any],
) -> None:
    drawn = []
    for curve in curves:
        values = smoothed(curve[measure]) * MEASURES[measure][1]
        places = np.array(curve.get(spent) or range(1, len(curve[measure]) + 1), np.float64)
        known = np.isfinite(values)  # lines go on across gaps, as on the page
        drawn.append((places[-len(values) :][known], values[known]))
    start, end = max(line[0][0] for line in drawn), min(line[0][-1] for line in drawn)
    at = np.linspace(start, max(start, end), POINTS)
    values = np.array([np.interp(at, *line) for line in drawn])
    one = "o" if start >= end else ""
    axes.plot(at, values.mean(axis=0), linewidth=1.8, label=label, marker=one, **look)
    if len(drawn) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        axes.fill_between(at, low, high, color=look["color"], alpha=0.15, linewidth=0)


def scaling(rows: Sequence[Mapping[str, Any]], axis: str, seeds: int) -> Figure:
    """Draw held-out success against one setting (ARPO 8).

    ``rows``: ``value`` of the setting, ``success`` with ``low`` and ``high`` (shares).
    """
    need_columns(rows, "scaling", "value", "success", "low", "high")
    rows = sorted(rows, key=lambda row: row["value"])
    settings, success, low, high = (
        np.array([row[name] for row in rows], np.float64)
        for name in ("value", "success", "low", "high")
    )
    figure = _figure(6.0, 4.2)
    axes = figure.subplots()
    lengths = 100 * np.maximum(0, [success - low, high - success])
    axes.errorbar(settings, 100 * success, yerr=lengths, color=LINES[0], marker="o", capsize=3)
    axes.set_xticks(settings, [f"{value:g}" for value in settings])
    axes.set(xlabel=axis, ylabel="held-out questions answered correctly (%)")
    _tidy(axes, "Scaling")
    return _noted(figure, f"{len(rows)} points; {_seeds(seeds)}; 95 % intervals")


def pass_at_k(rows: Mapping[str, Sequence[Mapping[str, float]]], seeds: int) -> Figure:
    """Draw pass@k against k, a line for each variant (ARPO 6).

    ``rows``: variant -> ``k``, ``mean``, ``low`` and ``high`` (shares).
    """
    _need(rows, "pass@k: no result has several answers a question")
    figure = _figure(6.0, 4.4)
    axes = figure.subplots()
    for number, (variant, rows_of_variant) in enumerate(rows.items()):
        k, mean, low, high = (
            np.array([row[name] for row in rows_of_variant])
            for name in ("k", "mean", "low", "high")
        )
        lengths = 100 * np.maximum(0, [mean - low, high - mean])
        look: dict[str, Any] = {"color": LINES[number % len(LINES)], "marker": "o", "capsize": 3}
        axes.errorbar(k + 0.04 * number, 100 * mean, yerr=lengths, label=variant, **look)
    axes.set(xlabel="answers a question, k", ylabel="pass@k of held-out questions (%)")
    _whole_numbers(axes)
    _tidy(axes, "pass@k (95 % intervals)")
    _legend(axes)
    points = sum(map(len, rows.values()))
    return _noted(figure, f"{points} points; {_seeds(seeds)}")


def advantages(histograms: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> Figure:
    """Draw the distribution of advantages at two updates, a line for each variant (GAGPO 5).

    ``histograms``: variant -> those of each seed, in the order of their updates
    (tasks/comparison/figure_data.py). Seeds may differ in their updates at an equal budget.
    """
    by_variant = {
        variant: rows for variant, seeds in histograms.items() if (rows := [o for o in seeds if o])
    }
    _need(by_variant, "advantages: no result has histograms")
    places = max(len(rows) for seeds in by_variant.values() for rows in seeds)
    figure = _figure(7.0, 2.6 * places + 1.2)
    grid = figure.subplots(places, 1, sharex=True, squeeze=False)[:, 0]
    middle = (EDGES[:-1] + EDGES[1:]) / 2
    for order, axes in enumerate(grid):
        for number, (variant, seeds) in enumerate(by_variant.items()):
            shown = [rows[min(order, len(rows) - 1)] for rows in seeds]
            counts = np.sum([row["counts"] for row in shown], axis=0)
            updates = sorted({row["iteration"] + 1 for row in shown})
            label = f"{variant}, update {' or '.join(map(str, updates))}"
            shares = 100 * counts / max(1, counts.sum())
            axes.step(middle, shares, where="mid", label=label, color=LINES[number % len(LINES)])
        axes.set(ylabel="advantages (%)")
        _tidy(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, edgecolor="none")
    grid[-1].set(xlabel="advantage; what is beyond the ends is counted there")
    figure.suptitle("Distribution of advantages", x=0.01, ha="left", weight="bold", color=INK)
    total = sum(
        sum(row["counts"]) for seeds in by_variant.values() for rows in seeds for row in rows
    )
    most = max(map(len, by_variant.values()))
    return _noted(figure, f"{total:,} advantages in {len(middle)} bins; {_seeds(most)}")


def state_groups(counts_by_variant: Mapping[str, Mapping[str, float]], seeds: int) -> Figure:
    """Draw the share of environment steps by how many of their group have an equal state.

    ``counts_by_variant``: variant -> size of the group of equal states -> steps (GAGPO, table 5).
    """
    _need(counts_by_variant, "state groups: no result counts equal states")
    names = list(next(iter(counts_by_variant.values())))
    figure = _figure(7.0, 1.5 + 0.4 * len(counts_by_variant))
    axes = figure.subplots()
    for height, counts in enumerate(counts_by_variant.values()):
        total, left = max(1.0, sum(counts.values())), 0.0
        for number, name in enumerate(names):
            share = 100 * counts[name] / total
            label = name if height == 0 else "_"
            shade = (number + 1) / len(names)
            axes.barh(height, share, left=left, color=LINES[0], alpha=shade, label=label)
            left += share
    axes.set_yticks(range(len(counts_by_variant)), list(counts_by_variant))
    axes.set(xlabel="environment steps (%), by steps of the group with an equal state")
    axes.set(xlim=(0, 100), ylim=(len(counts_by_variant) - 0.5, -0.5))
    _tidy(axes, "Steps that share their state", grid="x")
    _legend(figure, loc="outside upper center", ncols=len(names))
    steps = sum(sum(counts.values()) for counts in counts_by_variant.values())
    return _noted(figure, f"{steps:,.0f} environment steps; {_seeds(seeds)}")


def _has(curve: Curve, name: str) -> bool:
    return bool(np.isfinite(curve.get(name, ())).any())


def _all(curves: Mapping[str, Sequence[Curve]]) -> list[Curve]:
    return [curve for seeds in curves.values() for curve in seeds]


def _points(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Return how many iterations and seeds are drawn."""
    iterations = sum(max(map(len, curve.values())) for curve in _all(curves))
    return f"{iterations:,} iterations; {_seeds(max(map(len, curves.values())))}"


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def _need(series: Any, name: str) -> None:
    if not series:
        raise ValueError(f"{name}, so there is nothing to draw")


def _noted(figure: Figure, text: str) -> Figure:
    """Write how much a figure shows below it."""
    figure.supxlabel(text, size=8, color=GREY, x=0.99, ha="right")
    return figure
