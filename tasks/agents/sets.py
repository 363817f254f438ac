"""The tasks that agents are tried on: sets of a recipe's test panel, or of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from params import suggestions
from params.run_folders import RunFolders
from params.schema.benchmarks import load_benchmarks
from params.schema.recipe import Recipe
from tasks.questions import benchmarks
from tasks.questions.faults import summary
from tasks.trees import panels
from tasks.trees.tables import load_questions
from tasks.trees.tree import Question

Sets = dict[str, list[Question]]


def questions_of(
    name: str, recipe: Recipe, set_names: Sequence[str], most: int | None, params: Path
) -> Sets:
    """Return the tasks of each set in ``set_names``, at most ``most`` each.

    A name with a slash, such as ``hotpotqa/test``, is a set and a split of params/benchmarks.yaml;
    any other is a kind of the recipe's test panel, of which the first ``evaluate.questions`` tasks
    count. Without names, all kinds are returned. Raises ValueError with all faults, one line each.
    """
    given = [one for one in set_names if "/" not in one]
    sets: Sets = {}
    faults: list[str] = []
    if given or not set_names:
        try:
            held = _of_panel(name, recipe)
            unknown = [one for one in given if one not in held]
            faults += [
                f"--sets {one}: the test panel has {sorted(held)}{suggestions.meant(one, held)}"
                for one in unknown
            ]
            sets |= {one: held[one] for one in given or held if one in held}
        except ValueError as error:
            faults.append(str(error))
    for reference in (one for one in set_names if "/" in one):
        try:
            sets[reference] = of_benchmark(reference, params)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))
    return {one: sets[one][:most] for one in set_names or sets}


def _of_panel(name: str, recipe: Recipe) -> Sets:
    """Return the tasks of the test panel that an evaluation asks, by kind."""
    file, panel = RunFolders(name).split("test"), RunFolders(name).panel("test")
    if not (file.is_file() and panel.is_file()):
        raise ValueError(
            f"{name} has no test questions here: run `make run RECIPE={name}` (or only its stage, "
            f"dvc repro prepare@{name}), or name sets of params/benchmarks.yaml in --sets"
        )
    part = panels.load(panel).part(0, recipe.evaluate.questions)
    sets: Sets = {}
    for question in panels.questions_of(part, load_questions(file), str(panel)):
        sets.setdefault(question.kind, []).append(question)
    return sets


def of_benchmark(reference: str, params: Path) -> list[Question]:
    """Return all questions of a split. Raises ValueError where one cannot be read."""
    if reference.count("/") != 1 or not all(reference.split("/")):
        raise ValueError(f"--sets {reference}: write a set and a split, such as hotpotqa/test")
    loaded = benchmarks.load(
        reference, load_benchmarks(params), lambda question: (), solutions=False
    )
    if loaded.faults:
        raise ValueError(f"{reference}:\n{summary(loaded.faults)}")
    return [entry.question for entry in loaded.entries]
