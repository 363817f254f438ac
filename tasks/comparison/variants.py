"""The variants of a comparison: rows of params/algorithms.yaml with changes of a recipe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from params import overrides
from params.schema import algorithms
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.comparison.comparison import Variant

OWN_SECTIONS = ("reinforce", "lora", "engine", "reward_model.again")  # what a variant may override
DECIDED = {  # what a comparison sets itself
    "reinforce.algorithm": "name the row with --algorithms",
    "reinforce.iterations": "--budget decides when training ends",
}
STEPS = ("reinforce.update.epochs", "reinforce.update.mini_batches")  # optimizer steps a batch


def variants(name: str, rows: Sequence[str], changes: Sequence[str]) -> list[Variant]:
    """Return every row with the recipe as it is and with each of ``changes``.

    A change that begins with the name of a row and a colon, ``gagpo: …``, is for that row alone.
    Raises ValueError with all faults: unknown rows, overrides that do not hold or that decide what
    all variants share.
    """
    result, faults = [], []
    for change in dict.fromkeys(("", *changes)):
        only, text = _scope(change)
        if only and only not in rows:
            faults.append(f"--overrides {change}: {only} is none of the compared rows {list(rows)}")
        for row in dict.fromkeys(rows):
            try:
                if only in ("", row):
                    result.append(variant_of(name, row, shlex.split(text)))
            except ValueError as error:
                faults.append(str(error))
    if faults:
        raise ValueError("\n".join(dict.fromkeys(faults)))
    order = list(dict.fromkeys(rows))
    return sorted(result, key=lambda variant: order.index(variant.recipe.reinforce.algorithm))


def _scope(change: str) -> tuple[str, str]:
    """Return the row that a change is for, "" for every row, and the change itself."""
    scoped = re.fullmatch(r"([\w.-]+):\s+(.*)", change)
    return (scoped[1], scoped[2]) if scoped else ("", change)


def variant_of(name: str, row: str, changes: Sequence[str]) -> Variant:
    """Return a row with changes. Raises ValueError for changes that do not hold."""
    for change in changes:
        key = change.split("=")[0]
        own_section = any(f"{key}.".startswith(f"{section}.") for section in OWN_SECTIONS)
        if not own_section and not change.startswith(overrides.OF_ROW):
            raise ValueError(
                f"--overrides {change}: variants share everything but {list(OWN_SECTIONS)} and "
                "the algorithm's choices (algorithm.estimator.lambda=0); "
                "compare recipes by runs of their own instead (beamline retrain)"
            )
        if key in DECIDED:
            raise ValueError(f"--overrides {change}: {DECIDED[key]}")
    implied_changes = [f"reinforce.algorithm={row}"]
    choices = [change for change in changes if change.startswith(overrides.OF_ROW)]
    algorithm = algorithms.load_algorithms(Path("params")).get(row)
    if algorithm and choices:
        algorithm = recipes.row_changed(name, [*implied_changes, *choices], Path("params"))
    ratio = algorithm.ratio if algorithm else "none"
    if not any(change.startswith(STEPS) for change in changes):
        steps = enough_steps(recipes.load(name, Path("params")), ratio)
        implied_changes += [f"{STEPS[0]}={steps.epochs}", f"{STEPS[1]}={steps.mini_batches}"]
    recipe = recipes.load_changed(name, [*implied_changes, *changes], Path("params"))
    assert algorithm, "without its row, a recipe does not load"
    recipe = without_idle_validation(recipe)
    variant = Variant(", ".join([row, *changes]), recipe, algorithm)
    if ratio != "none" and variant.steps < 2:
        raise ValueError(
            f"--overrides {' '.join(changes)}: {row} has a ratio, which is 1 with one optimizer "
            "step a batch: let epochs times mini_batches be two or more"
        )
    return variant


def without_idle_validation(recipe: Recipe) -> Recipe:
    """Return the recipe without validation during training, unless that chooses the policy."""
    validation = recipe.reinforce.validation
    if validation is None or validation.publish == "best":
        return recipe
    section = recipe.reinforce.model_copy(update={"validation": None})
    return recipe.model_copy(update={"reinforce": section})


def enough_steps(recipe: Recipe, ratio: str) -> Any:
    """Return ``reinforce.update`` with two or more steps a batch for a ratio, and one without."""
    section = recipe.reinforce.update
    if ratio == "none":
        return section.model_copy(update={"epochs": 1, "mini_batches": 1})
    if section.epochs * section.mini_batches < 2:
        return section.model_copy(update={"mini_batches": 2})
    return section
