"""The run of a recipe that was committed before the one in this checkout, and what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.runs import git
from params import recipe_files
from params.run_folders import RunFolders
from params.whole_file import RESOLVED

MOST = 20  # commits that are looked at


@dataclass(frozen=True)
class EarlierRun:
    """A run that a commit has: its measures by agent, and the whole recipe."""

    commit: str
    metrics: Mapping[str, Any]  # as reports/<recipe>/metrics.json has them
    recipe: Mapping[str, Any]


def before(recipe: str, results: str) -> EarlierRun | None:
    """Return the newest committed run of a recipe with other results than ``results``.

    ``results``: the text of metrics.json of a finished run, which may be committed; "" while it
    goes on. Branches that retrainings make come first, the newest of them, then the commits up to
    HEAD that changed the recipe's reports. None where there is none that can be read.
    """
    file = RunFolders(recipe).metrics
    branches = list(reversed(git.commits_of_runs(recipe).values()))
    for commit in dict.fromkeys([*branches[:MOST], *git.commits_of(file.as_posix(), MOST)]):
        try:
            measured = git.content(commit, file.as_posix())
            if measured != results:
                return EarlierRun(commit, json.loads(measured), _recipe_at(commit, recipe))
        except (ValueError, OSError):  # it has another form, or its objects are not here
            continue
    return None


def _recipe_at(commit: str, recipe: str) -> Mapping[str, Any]:
    """Return the whole recipe of a commit. Raises ValueError where it has none."""
    resolved = f"params/{RESOLVED}/{recipe}.yaml"
    own = f"params/{recipe}.yaml"
    values = git.yaml_at(commit, resolved if git.size(commit, resolved) else own)
    if not isinstance(values, Mapping):
        raise ValueError(f"commit {commit} has no recipe {recipe}")
    return values


def changes(earlier: EarlierRun, recipe: str) -> list[str]:
    """Return a line for each value of a recipe that the earlier run had otherwise."""
    now = recipe_files.resolve(recipe, Path("params")).values
    return recipe_files.difference_lines(earlier.recipe, now)
