"""Collect what the pages of a run and of a comparison show beside the trees, as small JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.analysis import rises
from flows.analysis.rises import Measured
from flows.tracking import comparison_report
from flows.tracking import comparison_tables as tables
from flows.tracking.comparison_tables import COLD_START, Result
from flows.tracking.run_summary import verdict_sentence
from params import recipe_files
from params.run_folders import RunFolders
from params.schema.recipe import Recipe, algorithm_of
from tasks.evaluate import MEASURES
from tasks.trees import panels

UNITS = {name: unit for name, _, unit in MEASURES}  # of what is no share of the questions
DIGITS = 6  # of numbers in a page


def outcome(name: str) -> dict[str, Any]:
    """Return the results of a recipe's run; none without an evaluation."""
    reports = RunFolders(name).reports
    measured = _json(reports / "metrics.json")
    panel, gained = measured.pop("panel", None), measured.pop("differences", {})
    verdict = _json(reports / "verdict.json")
    return {
        "results": [measure_row(measure, agents) for measure, agents in measured.items()],
        "differences": [
            {"measure": measure, "agent": agent, **values}
            for measure, agents in gained.items()
            for agent, values in agents.items()
        ],
        "panel": panels.sentence(panel) if panel else "",
        "verdict": verdict_sentence(verdict) if verdict else "",
    }


# of a training that goes on
NO_OUTCOME: dict[str, Any] = {"results": [], "differences": [], "panel": "", "verdict": ""}


def measure_row(measure: str, agents: Mapping[str, Any]) -> dict[str, Any]:
    """Return a measure with its unit, by agent."""
    return {"measure": measure, "unit": UNITS.get(measure.split(", ")[0], "%"), "agents": agents}


def settings(name: str, recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as it is written, and how its leaves branch."""
    written = recipe_files.resolve(name, Path("params"))
    rollout, algorithm = recipe.reinforce.rollout, algorithm_of(recipe, Path("params"))
    return {
        "recipe_text": written.text(),
        "recipe_changed": list(written.changes()) if written.has_base else [],
        "branching": algorithm.branching,
        "rule": {
            "base": rollout.base_probability,
            "weight": rollout.entropy_weight,
            "threshold": rollout.threshold,
            "draw": rollout.draw,
        },
    }


def rises_of(name: str) -> Measured:
    """Return what the entropy does after tool results; {} for a run without such decisions."""
    try:
        return rises.of_run(name)
    except ValueError:
        return {}


def of_comparison(
    results: Sequence[Result], resamples: int, budget: str = "sampled_tokens", baseline: str = ""
) -> dict[str, Any]:
    """Return the tables and curves of a comparison; ``budget`` is the kind of cost on the x axis.

    ``baseline``: the variant that the others are compared with, by default the best one.
    """
    return {
        "rows": tables.table_rows(results, resamples),
        "kinds": tables.kind_rows(results, resamples),
        "differences": tables.difference_rows(results, resamples, baseline),
        "curves": tables.curves_of(results),
        "spent": list(tables.SPENT),
        "budget": budget,
        "panel": panels.sentence(results[0]["panel"]),
    }


def committed(recipe: str) -> list[Result]:
    """Return the results of a comparison that lie in ``reports/<recipe>/comparison``.

    Only those of the cold start's panel count, since others answered other questions, and none of
    an older form. Raises ValueError where there are none.
    """
    folder = RunFolders(recipe).reports / "comparison"
    documents = [json.loads(file.read_text()) for file in sorted(folder.glob("*/seed-*.json"))]
    read = [
        comparison_report.read(recipe, one["variant"], one["seed"], one["key"]) for one in documents
    ]
    whole = sorted(filter(None, read), key=lambda one: one["variant"] != COLD_START)
    if not whole or all(one["variant"] == COLD_START for one in whole):
        raise ValueError(
            f"{folder} has no results of a comparison: "
            f"make compare RECIPE={recipe} BUDGET=sampled_tokens=100000"
        )
    panel = whole[0]["panel"]["digest"]
    return [one for one in whole if one["panel"]["digest"] == panel]


def rounded(value: Any) -> Any:
    """Return JSON values with floats of few digits, and None for those that JSON cannot hold."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): rounded(one) for name, one in value.items()}
    return [*map(rounded, value)] if isinstance(value, list | tuple) else value


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {}
