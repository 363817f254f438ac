"""What training had spent when success first reached a level (ARPO, figure 7). Pure.

Success is that of the rollouts in training, at the temperature of training, as a mean over a
window of iterations that ends with the one that is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flows.tracking.comparison_tables import table

Curve = Mapping[str, Sequence[float]]  # measure -> a value an iteration
Curves = Mapping[str, Sequence[Curve]]  # variant -> a curve a seed

WINDOW = 5  # iterations
STEP = 0.05  # between levels
MOST_LEVELS = 8
RESAMPLES = 2000


def smoothed(values: Sequence[float], window: int = WINDOW) -> NDArray[np.float64]:
    """Return the mean of each value and the ones before it, where the window is full.

    Gaps (NaN) do not count; a window of gaps alone is one.
    """
    width = min(window, len(values))
    given, shares = np.asarray(values, np.float64), np.full(width, 1 / width)
    known = np.isfinite(given)
    with np.errstate(invalid="ignore"):
        sums = np.convolve(np.where(known, given, 0.0), shares, "valid")
        return np.where(known.all(), sums, sums / np.convolve(known, shares, "valid"))


def spent_until(
    curve: Curve, level: float, spent: str = "tool_calls", window: int = WINDOW
) -> float | None:
    """Return what was spent by the end of the first iteration with this success; None for never.

    ``level``: a share. ``curve[spent]`` is cumulative.
    """
    success = smoothed(curve["success"], window)
    reached = np.flatnonzero(success >= level - 1e-12)
    first = min(window, len(curve["success"])) - 1  # the iteration that ends the first window
    return float(curve[spent][first + reached[0]]) if len(reached) else None


def levels(curves: Curves, window: int = WINDOW) -> list[float]:
    """Return levels of success in steps of STEP, from above all starts to the highest reached.

    At most MOST_LEVELS, the highest ones.
    """
    lines = [smoothed(curve["success"], window) for seeds in curves.values() for curve in seeds]
    every = [known for line in lines if len(known := line[np.isfinite(line)])]
    if not every:
        return []
    low, high = max(one[0] for one in every), max(one.max() for one in every)
    first, last = int(np.floor(low / STEP + 1e-9)) + 1, int(np.floor(high / STEP + 1e-9))
    return [round(number * STEP, 10) for number in range(first, last + 1)][-MOST_LEVELS:]


def calls_rows(
    curves: Curves, success_levels: Sequence[float], spent: str = "tool_calls"
) -> list[dict[str, Any]]:
    """Return a row for each variant: ``variant`` and ``levels``, level -> what it took.

    That is ``seeds`` (how many there are), ``reached`` (how many reached it) and, where all did,
    ``mean`` with ``low`` and ``high``, a 95 % bootstrap interval over seeds (one seed has none).
    """
    return [
        {
            "variant": variant,
            "levels": {
                level: _over_seeds([spent_until(curve, level, spent) for curve in seeds])
                for level in success_levels
            },
        }
        for variant, seeds in curves.items()
    ]


def _over_seeds(costs: Sequence[float | None]) -> dict[str, Any]:
    reached = [value for value in costs if value is not None]
    told = {"seeds": len(costs), "reached": len(reached)}
    if len(reached) < len(costs) or not costs:
        return told
    drawn = np.array(reached)[_draws(len(costs))].mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {**told, "mean": float(np.mean(reached)), "low": float(low), "high": float(high)}


def ratio(
    curves: Curves, of: str, to: str, success_levels: Sequence[float], spent: str = "tool_calls"
) -> dict[str, Any] | None:
    """Return how much ``of`` had spent over ``to`` at the highest level that all seeds reached.

    ``level``, ``ratio`` of the means, ``low`` and ``high`` over seeds, which both are drawn with,
    and ``seeds``. None where no level was reached by all seeds of both, or a variant is missing.
    """
    for level in sorted(success_levels, reverse=True):
        costs_of, costs_to = (
            [spent_until(curve, level, spent) for curve in curves.get(name, ())]
            for name in (of, to)
        )
        pairs = [(a, b) for a, b in zip(costs_of, costs_to, strict=False) if a is not None and b]
        if not pairs or not len(pairs) == len(costs_of) == len(costs_to):
            continue
        of_S, to_S = np.array(pairs).T
        draws = _draws(len(pairs))
        drawn = of_S[draws].mean(axis=1) / to_S[draws].mean(axis=1)
        low, high = np.percentile(drawn, [2.5, 97.5])
        quotient = float(of_S.mean() / to_S.mean())
        ends = {"low": float(low), "high": float(high), "seeds": len(pairs)}
        return {"level": level, "ratio": quotient, **ends}
    return None


def _draws(seeds: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))


def calls_markdown(rows: Sequence[Mapping[str, Any]], what: str = "tool calls") -> str:
    """Format the table, with an explanation; "" where no level was reached."""
    success_levels = list(rows[0]["levels"]) if rows else []
    if not success_levels:
        return ""
    lines = [
        [row["variant"], *(_cell(row["levels"][level]) for level in success_levels)] for row in rows
    ]
    head = ["variant", *(f"{100 * level:.0f} %" for level in success_levels)]
    return (
        f"Executed {what} that training had spent when success first reached a level: the success "
        f"of rollouts at the\ntemperature of training, as the mean of the last {WINDOW} "
        "iterations, which the first window has to fill. With 95 %\nintervals "
        f"over seeds, where all reached it; else how many did.\n\n{table(head, lines)}"
    )


def _cell(summary: Mapping[str, Any]) -> str:
    if "mean" not in summary:
        return f"{summary['reached']} of {summary['seeds']} seeds"
    interval = f" [{summary['low']:,.0f}, {summary['high']:,.0f}]" if summary["seeds"] > 1 else ""
    return f"{summary['mean']:,.0f}{interval}"


def ratio_sentence(
    estimate: Mapping[str, Any] | None, of: str, to: str, claimed: float, what: str = "tool calls"
) -> str:
    """Say how many times ``to``'s cost ``of`` needed, and what it says of the paper's claim."""
    if not estimate:
        return (
            f"Whether {of} needs {claimed:g} times the {what} of {to} cannot be told here: there "
            "is no level of success above their starts that all seeds of both reached."
        )
    one = estimate["seeds"] == 1
    interval = "" if one else f" [{estimate['low']:.2f}, {estimate['high']:.2f}]"
    said = (
        f"To reach {100 * estimate['level']:.0f} % success in training, {of} needed "
        f"{estimate['ratio']:.2f}{interval} times the {what} of {to} "
        f"({_seeds(estimate['seeds'])}). "
    )
    if one:
        return f"{said}With one seed, this says nothing of the paper's {claimed:g}."
    if estimate["high"] < claimed:
        return f"{said}That is less than the paper's {claimed:g}."
    against_one = "leaves out 1" if estimate["high"] < 1 or estimate["low"] > 1 else "contains 1"
    if estimate["low"] > claimed:
        return f"{said}The paper's {claimed:g} does not come out here; the interval {against_one}."
    return f"{said}The interval contains the paper's {claimed:g}, and {against_one}."


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"
