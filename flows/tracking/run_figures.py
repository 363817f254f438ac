"""Draw the figures of a run: pure functions from plain rows to matplotlib figures.

Figures are built with matplotlib's object API, so nothing here touches pyplot's global state;
matplotlib is imported when the first figure is made. Colours are from Okabe and Ito (2008), which
colour-blind readers can distinguish. ``save`` writes the same bytes for the same figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from flows.host import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
GREY, PALE, INK = "#8C8C8C", "#E5E5E5", "#333333"
DOTS_PER_INCH = 150
VERDICTS = {  # of branching decisions: colour, mark
    "not wanted": (GREY, "o"),
    "wanted, but the budget was spent": (VERMILION, "X"),
    "branched": (BLUE, "s"),
}
AGENTS = {  # colour, mark, offset
    "cold start": (GREY, "o", -0.13),
    "trained": (BLUE, "s", 0.13),
    "champion": (VERMILION, "D", 0.0),
}

LINES = (BLUE, VERMILION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", INK)  # a variant each
DASHES = ("-", "--", "-.", ":")  # and for more variants
POINTS = 200  # at which the mean of several seeds is drawn
PANELS = {  # of training dynamics, and how their axes are called
    "success": "success of rollouts (%)",
    "episode_steps": "environment steps\nan episode",
    "gradient_norm": "gradient norm",
    "entropy": "token entropy / ln |V|",
    "advantage_spread": "standard deviation\nof advantages",
    "advantage_min": "smallest advantage",
    "advantage_max": "largest advantage",
    "singleton_share": "steps with a state\nof their own (%)",
}
SHARES = ("success", "singleton_share")  # drawn in %


def learning_curve(
    rows: Sequence[Mapping[str, float]], validation: Sequence[Mapping[str, float]] = ()
) -> Figure:
    """Draw mean reward and success by iteration: faint values, their running mean as a line.

    ``rows``: one an iteration, in any order, with ``iteration``, ``reward`` and ``success`` (a
    fraction). ``validation``: policies that were asked the validation questions, with
    ``iteration``, ``success`` and the bounds of its interval, ``success_low`` and ``success_high``.
    """
    need_columns(rows, "learning curve", "iteration", "reward", "success")
    rows = sorted(rows, key=lambda row: row["iteration"])
    iteration = np.array([row["iteration"] for row in rows], dtype=float)
    figure = _figure(7.0, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _smoothed(upper, iteration, np.array([row["reward"] for row in rows]), BLUE)
    _smoothed(lower, iteration, 100 * np.array([row["success"] for row in rows]), VERMILION)
    if validation:
        validation_iteration, mean, low, high = (
            np.array([row[name] for row in validation], dtype=float)
            for name in ("iteration", "success", "success_low", "success_high")
        )
        lower.errorbar(
            validation_iteration,
            100 * mean,
            yerr=100 * np.maximum(0, [mean - low, high - mean]),
            fmt="D",
            color=GREEN,
            label="validation questions, with 95 % interval",
        )
    upper.set(ylabel="mean reward of a trajectory")
    lower.set(ylabel="trajectories with the\nright answer (%)", xlabel="iteration", ylim=(0, 100))
    _whole_numbers(lower)
    _tidy(upper, "Learning curve")
    _tidy(lower)
    _legend(upper)
    _legend(lower)
    return figure


def entropy_around_tools(profile: Sequence[Mapping[str, float]]) -> Figure:
    """Draw mean token entropy (over ln|V|) around tool results, early and late in training.

    ``profile``: rows with ``iteration``, ``position`` (-1 is the last token before the call, 1 the
    first after the result), ``mean`` and ``standard_error`` (entropy over ln|V|). The first and the
    last iteration are drawn, each with a band of one standard error.
    """
    need_columns(profile, "entropy profile", "iteration", "position", "mean", "standard_error")
    figure = _figure(7.0, 4.2)
    axes = figure.subplots()
    iterations = sorted({row["iteration"] for row in profile})
    for iteration, color in {iterations[0]: GREY, iterations[-1]: BLUE}.items():
        rows = [row for row in profile if row["iteration"] == iteration]
        before = [row for row in rows if row["position"] < 0]
        after = [row for row in rows if row["position"] > 0]
        _line_with_band(axes, before, color, label="_")  # "_": not in the legend
        _line_with_band(axes, after, color, label=f"iteration {iteration:g}")
    axes.axvline(0, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        "tool result",
        (0, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        color=INK,
    )
    axes.set(
        xlabel="sampled token, counted from the tool result",
        ylabel="mean entropy / ln |V|",
    )
    axes.margins(y=0.1)  # room for the note
    axes.set_ylim(bottom=0)
    _whole_numbers(axes)
    _tidy(axes, "Token entropy around tool results (band: ± 1 standard error)")
    _legend(axes)
    return figure


def reliability(bins: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Draw the share of successes over the reward model's probability, and after calibration.

    ``bins``: name -> rows with ``count``, ``probability`` and ``success``; a point's area grows
    with its count.
    """
    figure = _figure(5.0, 4.6)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=(0, (4, 3)), label="calibrated")
    for (name, rows), color in zip(bins.items(), (VERMILION, BLUE), strict=False):
        total = sum(row["count"] for row in rows)
        axes.plot(
            [row["probability"] for row in rows],
            [row["success"] for row in rows],
            color=color,
            label=f"{name} calibration",
        )
        axes.scatter(
            [row["probability"] for row in rows],
            [row["success"] for row in rows],
            s=[20 + 300 * row["count"] / total for row in rows],
            color=color,
            alpha=0.5,
        )
    axes.set(xlabel="probability of success that the model gives", ylabel="share of successes")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    _tidy(axes, "Reward model on questions that it has not seen")
    _legend(axes)
    return figure


def success_by_kind(table: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the success of each agent by question kind, with 95 % intervals.

    ``table``: rows with ``kind``, ``agent`` (one of AGENTS), ``success``, ``low`` and ``high``
    (fractions). Kinds stand in the order of their first rows. A champion may be missing.
    """
    need_columns(table, "success table", "kind", "agent", "success", "low", "high")
    if unknown := {row["agent"] for row in table} - set(AGENTS):
        raise ValueError(f"success table: agent must be one of {list(AGENTS)}, got {unknown}")
    kinds = list(dict.fromkeys(row["kind"] for row in table))
    figure = _figure(7.0, 1.6 + 0.55 * len(kinds))
    axes = figure.subplots()
    for agent, (color, mark, offset) in AGENTS.items():
        rows = [row for row in table if row["agent"] == agent]
        if not rows and agent == "champion":
            continue
        heights = [kinds.index(row["kind"]) + offset for row in rows]
        _dots_with_intervals(axes, rows, heights, color=color, fmt=mark, label=agent)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set(
        xlabel="questions answered correctly (%), with 95 % interval",
        xlim=(0, 100),
        ylim=(len(kinds) - 0.5, -0.5),
    )
    _tidy(axes, "Success by question kind", grid="x")
    _legend(axes, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
    return figure


def comparison(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the success of each variant: its seeds, their mean with its 95 % interval.

    ``rows``: one a variant, with ``variant``, ``success``, ``low``, ``high`` (fractions) and
    ``by_seed`` (seed -> success), the cold start first, which is drawn as a line, too.
    """
    need_columns(rows, "comparison", "variant", "success", "low", "high", "by_seed")
    figure = _figure(7.0, 1.4 + 0.34 * len(rows))
    axes = figure.subplots()
    for height, row in enumerate(rows):
        seeds = [100 * value for value in row["by_seed"].values()]
        axes.scatter(seeds, [height + 0.22] * len(seeds), s=12, color=GREY, linewidths=0)
    _dots_with_intervals(axes, rows, list(range(len(rows))), color=BLUE, fmt="o", label="_")
    axes.axvline(100 * rows[0]["success"], color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.set(
        xlabel="questions answered correctly (%), with 95 % interval; grey: each seed",
        xlim=(0, 100),
        ylim=(len(rows) - 0.5, -0.5),
    )
    _tidy(axes, "Success by variant", grid="x")
    return figure


def training_curves(
    curves: Mapping[str, Sequence[Mapping[str, Sequence[float]]]], position: str, label: str
) -> Figure:
    """Draw how training went: a panel for each of PANELS, a line for each variant.

    ``curves``: variant -> the curve of each seed: measure -> a value an iteration. ``position`` is
    the measure that they are drawn against, ``label`` its name. A line is the mean over seeds, each
    smoothed over an eighth of its iterations, where all seeds have values; the band goes from the
    lowest to the highest seed. A panel that no variant has values for is left out.
    """
    need_columns(
        [{"seeds": len(seeds) or None} for seeds in curves.values()], "training curves", "seeds"
    )
    shown = [
        name
        for name in PANELS
        if any(name in curve for seeds in curves.values() for curve in seeds)
    ]
    rows = -(-len(shown) // 2)
    figure = _figure(9.0, 0.9 + 2.3 * rows + 0.22 * -(-len(curves) // 2))
    grid = list(figure.subplots(rows, 2, sharex=True, squeeze=False).flat)
    for name, axes in zip(shown, grid, strict=False):
        for number, (variant, seeds) in enumerate(curves.items()):
            look = {
                "color": LINES[number % len(LINES)],
                "linestyle": DASHES[number // len(LINES) % 4],
            }
            if curves_of_variant := [curve for curve in seeds if name in curve]:
                _seeds_with_band(axes, curves_of_variant, position, name, label=variant, **look)
        axes.set(ylabel=PANELS[name], xlabel=label)
        _tidy(axes)
        axes.tick_params(labelbottom=True)
    for axes in grid[len(shown) :]:
        axes.remove()
    most = max(map(len, curves.values()))
    figure.suptitle(
        f"Training: {'one seed' if most == 1 else f'mean of {most} seeds, band: lowest to highest'}"
        ", smoothed over an eighth of the iterations",
        x=0.01,
        ha="left",
        weight="bold",
        color=INK,
        size=11,
    )
    if len(curves) > 1:
        handles, names = figure.axes[0].get_legend_handles_labels()
        _legend(figure, handles=handles, labels=names, loc="outside lower center", ncols=2)
    return figure


def _seeds_with_band(
    axes: Axes,
    curves: Sequence[Mapping[str, Sequence[float]]],
    position: str,
    measure: str,
    **look: Any,
) -> None:
    """Draw the mean of several seeds' curves between the positions that all of them reach."""
    scale = 100 if measure in SHARES else 1
    starts, ends = ([curve[position][end] for curve in curves] for end in (0, -1))
    places = np.linspace(max(starts), max(max(starts), min(ends)), POINTS)
    values = np.array(
        [
            np.interp(places, curve[position], running_mean(np.array(curve[measure]), reach))
            for curve in curves
            for reach in [len(curve[measure]) // 16]
        ]
    )
    one = len(np.unique(places)) == 1
    axes.plot(places, scale * values.mean(axis=0), linewidth=1.8, marker="o" if one else "", **look)
    if len(curves) > 1:
        low, high = scale * values.min(axis=0), scale * values.max(axis=0)
        axes.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)


def state_groups(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the share of environment steps by how many steps of the group have an equal state.

    ``rows``: one an iteration with ``iteration`` and ``sizes``, size -> steps, in equal order.
    """
    need_columns(rows, "state groups", "iteration", "sizes")
    names = list(rows[0]["sizes"])
    counts = np.array([[row["sizes"][name] for name in names] for row in rows], np.float64)
    shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure = _figure(7.0, 3.6)
    axes = figure.subplots()
    lower = np.zeros(len(rows))
    for number, name in enumerate(names):
        shade = (number + 1) / len(names)
        axes.bar(
            [row["iteration"] for row in rows],
            shares[:, number],
            bottom=lower,
            width=1.0,
            color=BLUE,
            alpha=shade,
            linewidth=0,
            label=name,
        )
        lower += shares[:, number]
    axes.set(xlabel="iteration", ylabel="environment steps (%)", ylim=(0, 100))
    _whole_numbers(axes)
    _tidy(axes, "Steps by how many of their group have the same state")
    _legend(figure, loc="outside lower center", ncols=len(names))
    return figure


def decisions(rows: Sequence[Mapping[str, Any]], threshold: float | None = None) -> Figure:
    """Draw branching decisions: the rise of entropy by position in the trajectory.

    ``rows``: one a decision, with ``position`` (tokens before it, prompt included), ``rise``
    (entropy over ln|V| minus that of the trajectory's start), ``wanted`` (the rule's decision) and
    ``added`` (branches that were started). ``threshold``: the rise above which a path branches
    (tasks/rollouts/branching.py), or None where no single value decides. Rows at results have the
    rule's ``probability``, too.
    """
    need_columns(rows, "branching decisions", "position", "rise", "wanted", "added")
    verdicts = [_verdict(row) for row in rows]
    figure = _figure(7.0, 4.4)
    axes = figure.subplots()
    for verdict, (color, mark) in VERDICTS.items():
        rows_of_verdict = [row for row, its in zip(rows, verdicts, strict=True) if its == verdict]
        axes.scatter(
            [row["position"] for row in rows_of_verdict],
            [row["rise"] for row in rows_of_verdict],
            s=26,
            color=color,
            marker=mark,
            alpha=0.65,
            linewidths=0,
            label=f"{verdict} ({len(rows_of_verdict):,})",
        )
    axes.axhline(0, color=PALE, linewidth=1.5, zorder=0)
    if threshold is not None:
        label = f"branches above {threshold:.3g}"
        axes.axhline(threshold, color=INK, linewidth=1, linestyle=(0, (4, 3)), label=label)
    axes.set(
        xlabel="tokens of the trajectory before the decision, prompt included",
        ylabel="rise of the mean entropy / ln |V|",
    )
    _whole_numbers(axes)
    _tidy(axes, f"{len(rows):,} branching decisions{_odds(rows)}")
    _legend(figure, loc="outside lower center", ncols=2)
    return figure


def _odds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how far from one half the rule's P is; "" for decisions at marks alone."""
    known = [p for row in rows if (p := row.get("probability")) is not None]
    if not known:
        return ""
    low, high = np.percentile(np.array(known), [5, 95])
    return f", P {low:.4f} to {high:.4f} (5 to 95 %)"


def _verdict(row: Mapping[str, Any]) -> str:
    if row["added"]:
        return "branched"
    return "wanted, but the budget was spent" if row["wanted"] else "not wanted"


def seconds_by_part(parts: Mapping[str, float]) -> Figure:
    """Draw the seconds of one iteration by part, longest first, with their shares."""
    if not parts or min(parts.values()) < 0 or sum(parts.values()) <= 0:
        raise ValueError(f"parts of an iteration are positive seconds, got {dict(parts)}")
    names = sorted(parts, key=lambda name: -parts[name])
    seconds = [parts[name] for name in names]
    total = sum(seconds)
    figure = _figure(7.0, 1.2 + 0.36 * len(names))
    axes = figure.subplots()
    bars = axes.barh(names, seconds, color=BLUE, height=0.62)
    labels = [f"{value:.2f} s   {100 * value / total:.1f} %" for value in seconds]
    axes.bar_label(bars, labels, padding=5, color=INK)
    axes.invert_yaxis()
    axes.set(xlabel="seconds", xlim=(0, 1.28 * max(seconds)))  # room for the longest bar's label
    _tidy(axes, f"One iteration: {total:.2f} s", grid="x")
    axes.tick_params(axis="y", length=0)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG under a temporary name, then rename it; without date or version."""
    if path.suffix != ".png":
        raise ValueError(f"{path}: figures are saved as .png; give it that ending")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None})


def running_mean(values: NDArray[np.floating], reach: int) -> list[float]:
    """Return the mean of each value and up to ``reach`` neighbours on either side."""
    return [
        float(values[max(0, here - reach) : here + reach + 1].mean()) for here in range(len(values))
    ]


def _smoothed(
    axes: Axes, iteration: NDArray[np.floating], values: NDArray[np.floating], color: str
) -> None:
    reach = len(values) // 16  # an eighth of the run in all
    axes.plot(iteration, values, ".", markersize=5, color=color, alpha=0.35, label="one iteration")
    label = f"mean of {2 * reach + 1} iterations" if reach else "_"
    axes.plot(iteration, running_mean(values, reach), color=color, linewidth=2, label=label)


def _line_with_band(
    axes: Axes, rows: Sequence[Mapping[str, float]], color: str, label: str
) -> None:
    rows = sorted(rows, key=lambda row: row["position"])
    position, mean, error = (
        np.array([row[column] for row in rows], dtype=float)
        for column in ("position", "mean", "standard_error")
    )
    axes.plot(position, mean, color=color, linewidth=2, marker=".", label=label)
    axes.fill_between(position, mean - error, mean + error, color=color, alpha=0.2, linewidth=0)


def _dots_with_intervals(
    axes: Axes, rows: Sequence[Mapping[str, Any]], heights: Sequence[float], **look: Any
) -> None:
    success, low, high = (
        100 * np.array([row[column] for row in rows], dtype=float)
        for column in ("success", "low", "high")
    )
    lengths = np.maximum(0, [success - low, high - success])  # rounding may leave -1e-16
    axes.errorbar(success, heights, xerr=lengths, markersize=6, elinewidth=2, **look)


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure; width and height in inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout=layout)


def _tidy(axes: Axes, title: str = "", grid: Literal["both", "x", "y"] = "both") -> None:
    axes.set_title(title, loc="left", weight="bold", color=INK, size=11)
    axes.grid(axis=grid, color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(color=GREY, labelcolor=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def _legend(where: Axes | Figure, **options: Any) -> None:
    where.legend(fontsize=9, labelcolor=INK, edgecolor="none", framealpha=0.9, **options)


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))


def need_columns(rows: Sequence[Mapping[str, Any]], name: str, *columns: str) -> None:
    """Raise ValueError for no rows, or for a row without one of the columns."""
    if not rows:
        raise ValueError(f"{name}: there are no rows to draw")
    for number, row in enumerate(rows):
        if missing := [column for column in columns if row.get(column) is None]:
            raise ValueError(f"{name}: row {number} has no value of {missing}; it has {list(row)}")
