"""What the entropy does after tool results, and whether it finds the places that matter.

ARPO (arXiv 2507.19849) branches where the entropy has risen after a tool's result, since the policy
is uncertain there and another attempt may end otherwise. ``of_run`` says of all decisions of a run
how much it rises, what the rule made of that, and whether it rose more where the trajectories below
a result then ended with different rewards. That is the area under the ROC curve (AUC): the
probability that the value is higher at a result below which rewards differ than at one below which
they are equal; 0.5 is chance. Only results with several trajectories below them can tell, and where
the rule has branched by the rise, most of these have a high one: ``draw: true`` avoids that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flows.analysis import frames
from tasks.trees.metrics import PERCENTILES
from tasks.trees.tree import AFTER_RESULT

RESAMPLES = 1000
LEAST = 5  # results of either kind for an AUC; fewer tell nothing
Values = NDArray[np.float64]  # [N], a value a decision
Measured = dict[str, Sequence[float]]  # label -> a value; with low and high; or none at all
PREDICTORS: Mapping[str, Callable[[pd.DataFrame], pd.Series]] = {
    "the rise dH": lambda judged: judged["rise"],
    "dH / H_initial": lambda judged: judged["rise"] / judged["initial_entropy"].clip(lower=1e-12),
    "H after the result": lambda judged: judged["entropy"],
}


def of_run(recipe: str, project: Path | str = frames.HERE) -> Measured:
    """Return the measures of a run by label, in the order of the table.

    Entropies are divided by ln|V|. Values that a run does not have are (). Raises ValueError where
    no run has left its tables, or no decision after a tool result.
    """
    judged = judged_results(recipe, project)
    if judged.empty:
        raise ValueError(
            f"the run of {recipe} has no branching decision after a tool result: its algorithm "
            "branches at marks, or its agent called nothing"
        )
    several = judged[judged["below"] > 1]
    differ = several["differ"].to_numpy(bool)
    trees = np.asarray(several.groupby(frames.KEYS, sort=False).ngroup(), np.int64)
    return {
        **_levels(judged),
        "results with several trajectories below": (float(len(several)),),
        "of these, dH > 0 (%)": (100 * float((several["rise"] > 0).mean()),) if len(differ) else (),
        "of these, rewards differ (%)": (100 * float(differ.mean()),) if len(differ) else (),
        **{
            f"AUC of {name}": auc(value(several).to_numpy(float), differ, trees)
            for name, value in PREDICTORS.items()
        },
    }


def judged_results(recipe: str, project: Path | str = frames.HERE) -> pd.DataFrame:
    """Return the decisions after tool results, a row each.

    Beside the stored columns: ``below``, the number of leaves below the result, and ``differ``,
    whether these have different rewards.
    """
    decisions = frames.decisions(recipe, project=project)
    judged = decisions[decisions["kind"] == AFTER_RESULT]
    paths = frames.leaves(recipe, project=project)[[*frames.KEYS, "leaf", "path"]]
    rewards = frames.rewards(recipe, project=project)[[*frames.KEYS, "leaf", "reward"]]
    through = paths.merge(rewards, on=[*frames.KEYS, "leaf"]).explode("path")
    ends = through.groupby([*frames.KEYS, "path"])["reward"].agg(below="size", differ="nunique")
    below = ends.assign(differ=ends["differ"] > 1).rename_axis(index={"path": "node"}).reset_index()
    return judged.astype({"node": np.int64}).merge(
        below.astype({"node": np.int64}), on=[*frames.KEYS, "node"]
    )


def _levels(judged: pd.DataFrame) -> Measured:
    """Return how high the entropy is, how much it rises, and what the rule made of it."""
    rise, initial, entropy = (judged[name] for name in ("rise", "initial_entropy", "entropy"))
    return {
        "decisions after tool results": (float(len(judged)),),
        "mean H_initial": (float(initial.mean()),),
        "mean H after the result": (float(entropy.mean()),),
        "results with dH > 0 (%)": (100 * float((rise > 0).mean()),),
        **_percentiles("dH", rise),
        **_percentiles("P", judged["probability"]),
        "the rule branches (%)": (100 * float(judged["wanted"].mean()),),
        "branches were started (%)": (100 * float((judged["added"] > 0).mean()),),
    }


def _percentiles(name: str, values: pd.Series) -> Measured:
    found = np.percentile(values.to_numpy(float), PERCENTILES)
    return {f"{name}, percentile {p}": (float(v),) for p, v in zip(PERCENTILES, found, strict=True)}


def auc(values: Values, positive: NDArray[np.bool_], groups: NDArray[np.int64]) -> Sequence[float]:
    """Return the area under the ROC curve with its 95 % interval; () with fewer than LEAST of each.

    values [N], positive [N]: what should have the higher values; equal ones count half. groups [N]:
    the tree of each, from 0 on. The interval is the percentile bootstrap over trees, since results
    of one tree share what came before them; resamples without one of the classes are left out.
    """
    if min(positive.sum(), (~positive).sum()) < LEAST:
        return ()
    order = np.unique(values, return_inverse=True)[1]
    draw, count = np.random.default_rng(0), int(groups.max()) + 1
    resampled = [
        _area(order, positive, draw.multinomial(count, np.full(count, 1 / count))[groups])
        for _ in range(RESAMPLES)
    ]
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return _area(order, positive, np.ones(len(values), np.int64)), float(low), float(high)


def _area(
    order: NDArray[np.int64], positive: NDArray[np.bool_], weights: NDArray[np.int64]
) -> float:
    """Return the area for values with these ranks, each counted so many times; NaN for none."""
    size = int(order.max()) + 1
    above = np.bincount(order, weights * positive, size)
    below = np.bincount(order, weights * ~positive, size)
    pairs = above.sum() * below.sum()
    won = above @ (np.cumsum(below) - below / 2)
    return float(won / pairs) if pairs else float("nan")


def table(measured: Mapping[str, Measured]) -> str:
    """Return the measures of runs beside each other, as lines of text; by recipe."""
    labels = list(next(iter(measured.values())))
    rows = [["Entropy / ln |V|", *measured]]
    rows += [[label, *(_cell(run[label]) for run in measured.values())] for label in labels]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Iterable[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def _cell(value: Sequence[float]) -> str:
    """Return a value, or one with its interval; "-" for none."""
    if not value:
        return "-"
    mean, *bounds = (f"{number:,.0f}" if number % 1 == 0 else f"{number:.4g}" for number in value)
    return f"{mean} [{', '.join(bounds)}]" if bounds else mean
