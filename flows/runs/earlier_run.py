"""The run of a recipe that was committed before the one in this checkout, and what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.runs import git, recipe_values
from flows.tracking.run_summary import Changes, differing
from params.run_folders import RunFolders

MOST = 20  # commits that are looked at


@dataclass(frozen=True)
class EarlierRun:
    """A run that a commit has, with its measures by agent."""

    commit: str
    metrics: Mapping[str, Any]  # as reports/<recipe>/metrics.json has them


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
                return EarlierRun(commit, json.loads(measured))
        except (ValueError, OSError):  # it has another form, or its objects are not here
            continue
    return None


def changes(earlier: EarlierRun, recipe: str) -> Changes:
    """Return the values of a recipe that the earlier run had otherwise; {} where it had none."""
    values = recipe_values.at(earlier.commit, recipe)
    return differing(values, recipe_values.here(recipe)) if values else {}
