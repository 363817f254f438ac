"""What the papers' figures need of a training and of answers, small enough for a result's file.

Everything is read from the ledger's records and tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.algorithms import Algorithm
from tasks.dialects.contract import calls_in
from tasks.evaluate import KS, MEASURES
from tasks.learning.algorithm import CREDITED
from tasks.ledger import artifacts
from tasks.rewards.scoring import Reader
from tasks.training.iteration import Iteration
from tasks.trees.profiles import entropy_by_tool, pooled
from tasks.trees.repeats import any_right
from tasks.trees.tables import load_trees, read_rows

ENDS = 4  # iterations at the start and at the end whose entropies are pooled, at most
SHOWN = (3 / 8, 3 / 4)  # of the updates: GAGPO shows 60 and 120 of 160 (figure 5)
EDGES = np.linspace(-4.0, 4.0, 33)  # of a histogram of advantages; what is outside is at its ends


def of_training(done: Sequence[Iteration], row: Algorithm, reader: Reader) -> dict[str, Any]:
    """Return what figures need of a training: lists and numbers, by name.

    ``entropy_by_tool``: when ("first", "last") -> tool -> a profile (tasks/trees/profiles.py), over
    at most ENDS iterations at either end. ``advantages``: at SHOWN, the iteration and a histogram.
    ``state_groups``: size -> environment steps, a count an iteration. ``branches``: how many.
    """
    few = min(ENDS, max(1, len(done) // 2))
    sizes: list[dict[str, Any]] = [one["advantage"][0].get("state_groups") or {} for one in done]
    return {
        "entropy_by_tool": {
            when: _entropies(part, reader)
            for when, part in (("first", done[:few]), ("last", done[-few:]))
        },
        "advantages": [
            histogram(number, _credits(done[number], row)) for number in shown(len(done))
        ],
        "state_groups": {name: [one[name] for one in sizes] for name in sizes[0]},
        "branches": sum(one["metrics"]["branches"] for it in done for one in it["rollout"]),
    }


def shown(iterations: int) -> list[int]:
    """Return the iterations, from 0, whose advantages are shown."""
    return sorted({min(iterations - 1, int(share * iterations)) for share in SHOWN})


def of_answers(answers: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return measures of the answers to each question, and pass@k where there are several.

    ``measures``: label -> mean of each question; ``pass_at``: k -> estimate of each question.
    """
    samples = min(len(rows) for rows in answers)
    ks = sorted({1, *(k for k in KS if k <= samples), samples}) if samples > 1 else []
    right = [[bool(row["success"]) for row in rows] for rows in answers]
    return {
        "measures": {
            label: [_short(np.mean([float(value(row)) for row in rows])) for rows in answers]
            for label, value, _ in MEASURES
        },
        "pass_at": {str(k): [_short(any_right(successes, k)) for successes in right] for k in ks},
    }


def histogram(iteration: int, advantages: NDArray[np.floating]) -> dict[str, Any]:
    """Count advantages by EDGES, with their quartiles and the share with |A| > 1."""
    inside = np.clip(advantages, EDGES[0], EDGES[-1])
    quartiles = np.percentile(advantages, [25, 50, 75]) if len(advantages) else np.zeros(3)
    return {
        "iteration": iteration,
        "counts": np.histogram(inside, EDGES)[0].tolist(),
        "quartiles": [_short(value) for value in quartiles],
        "above_1": _short(np.mean(np.abs(advantages) > 1)) if len(advantages) else 0.0,
    }


def _entropies(iterations: Sequence[Iteration], reader: Reader) -> dict[str, Any]:
    by_tool: dict[str, list[Any]] = {}
    for iteration in iterations:
        for record in iteration["rollout"]:
            trees = load_trees(Path(artifacts.output(record, "trees").path))
            for tool, profile in entropy_by_tool(trees, tool_named(reader)).items():
                by_tool.setdefault(tool, []).append(profile)
    return {
        tool: {
            name: [_short(value) for value in column] for name, column in pooled(profiles).items()
        }
        for tool, profiles in sorted(by_tool.items())
    }


def tool_named(reader: Reader) -> Any:
    """Return a function from the text of a turn to the name of its tool, "act" for another act.

    The tools of several calls are joined by "+", each once.
    """

    def tool_of(text: str) -> str:
        return "+".join(dict.fromkeys(call.tool for call in calls_in(reader, text))) or "act"

    return tool_of


def _credits(iteration: Iteration, row: Algorithm) -> NDArray[np.float64]:
    rows = read_rows(Path(artifacts.output(iteration["advantage"][0], "advantages").path))
    return credited(rows, CREDITED[row.estimator.kind])


def credited(rows: Sequence[Mapping[str, Any]], unit: str) -> NDArray[np.float64]:
    """Return the advantage of each leaf, step or token that gets one of its own. [N]

    ``rows``: of the table of advantages; those that the group filter dropped do not count.
    """
    firsts: dict[str, Callable[[Any], Any]] = {
        "leaf": lambda segments: [0],
        "step": lambda segments: np.unique(segments, return_index=True)[1],
        "token": lambda segments: np.arange(len(segments)),
    }
    first = firsts[unit]
    values = [
        np.array(row["advantages"], np.float64)[first(row["segments"])]
        for row in rows
        if row["kept"] and len(row["advantages"] or ())
    ]
    return np.concatenate([np.zeros(0), *values])


def _short(value: Any) -> float:
    return float(f"{float(value):.4g}")
