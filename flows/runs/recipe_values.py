"""What a run says of its recipe: values that are special in it, and how to restore it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.runs import git
from flows.runs.dvc_command import RUN
from flows.runs.pipeline import recipe_paths
from flows.runs.provenance_links import reproducing_commit
from flows.tracking import store
from flows.tracking.run import flatten
from flows.tracking.run_summary import Changes, changes_line, description, differing, run_name
from params import recipe_files, strict_yaml
from params.schema.recipe import Recipe, algorithm_of
from params.whole_file import whole_file

PARAMS, TABLE = Path("params"), Path("params/algorithms.yaml")
SHORT = 12  # characters of a commit
RunBefore = tuple[str, dict[str, str]]  # name and parameters


def parameters(recipe: Recipe) -> dict[str, Any]:
    """Return the values of a recipe that was checked, with its algorithm's row."""
    row = algorithm_of(recipe, PARAMS).model_dump(mode="json", by_alias=True)
    return {**recipe.model_dump(mode="json"), "algorithm": row}


def run_before(recipe: str) -> RunBefore | None:
    """Return the newest run of a recipe in MLflow; None without one, or where MLflow is away."""
    with suppress(ConnectionError):
        return store.last_pipeline(recipe)
    return None


@dataclass(frozen=True)
class About:
    """A run that begins: its recipe, its parameters, and the run of the recipe before it."""

    recipe: str
    parameters: Mapping[str, str]
    before: RunBefore | None

    def name(self) -> str:
        """Return the run's name, with what is special in its recipe; "" for nothing special.

        Special are values that differ from the committed recipe: they are in no commit, or were set
        for this run. Without such, they are those that differ from the run before.
        """
        committed = at("HEAD", self.recipe)
        changes = differing(committed, here(self.recipe)) if committed else {}
        return run_name(self.recipe, changes or self.changes())

    def lines(self) -> list[str]:
        """Return the lines of the description about code, how to restore the run, and recipe."""
        return [_restoring(self.recipe), self._beside()]

    def changes(self) -> Changes:
        """Return what differs from the run before; {} without one."""
        return differing(self.before[1], self.parameters) if self.before else {}

    def _beside(self) -> str:
        """Say how the recipe differs from that of the run before, or from its base."""
        if self.before:
            return changes_line(self.changes(), f"the run before (`{self.before[0]}`)")
        resolved = recipe_files.resolve(self.recipe, PARAMS)
        if not resolved.has_base:
            return "**Recipe**: its first run here"
        levels = [flatten(values) for values in resolved.levels()]
        return changes_line(differing(levels[0], levels[-1]), f"`{resolved.chain[-1].name}`")


def _restoring(recipe: str) -> str:
    """Name the command that restores a run that is not in a commit yet, and its code."""
    code = git.revision()
    branch = os.environ.get(RUN)
    known = f"`{code.commit[:SHORT]}`" if code.commit else "in no commit"
    if branch:  # the run becomes a commit when it has ended
        return f"**Restore**: `beamline reproduce runs/{branch}` (code {known})"
    command = f"`beamline reproduce COMMIT --recipe {recipe}`"
    changed = ", with changes that are in no commit" if code.dirty else ""
    return f"**Restore**: commit it, then {command} (code {known}{changed})"


def of_version(recipe: str, commit: str, verdict: Mapping[str, Any]) -> str:
    """Return the description of a model's version, from what the commit of its run has.

    Its recipe is shown beside that of the champion that it was compared with or, without one, with
    what was set for the run.
    """
    beaten = verdict.get("champion") or {}
    before = at(beaten["commit"], recipe) if beaten.get("commit") else {}
    changes = differing(before, at(commit, recipe))
    recipe_line = f"**Recipe**: {', '.join(git.trailer(commit, 'Set').splitlines()) or 'as it was'}"
    if before:
        recipe_line = changes_line(changes, f"version {beaten['version']}, the champion before")
    code = git.trailer(commit, "Code")
    of_code = f" (code `{code[:SHORT]}`)" if code else ""
    return description(
        _measured(recipe, commit),
        verdict,
        [
            f"**Restore**: `{reproducing_commit(recipe, commit)}`{of_code}",
            recipe_line,
        ],
    )


def _measured(recipe: str, commit: str) -> dict[str, Any]:
    """Return the success of each agent at a commit; {} for a file that says none."""
    with suppress(ValueError, AttributeError, TypeError, KeyError, RecursionError):
        success = json.loads(git.content(commit, f"reports/{recipe}/metrics.json"))["success"]
        return {
            "success": {
                agent: {bound: float(values[bound]) for bound in ("mean", "low", "high")}
                for agent, values in success.items()
            }
        }
    return {}


# ---------------------------------------------------------------- values as files have them


def here(recipe: str) -> dict[str, str]:
    """Return the values in the files of this checkout, with the algorithm's row."""
    rows = strict_yaml.read(TABLE) if TABLE.exists() else {}
    return _with_row(strict_yaml.read(whole_file(recipe, PARAMS)), rows)


def at(commit: str, recipe: str) -> dict[str, str]:
    """Return the same at a commit; {} where it has no such recipe, or none that can be read."""
    with suppress(ValueError, AttributeError, TypeError, KeyError):
        paths = [path for path in reversed(recipe_paths(recipe)) if git.committed(path, at=commit)]
        table = TABLE.as_posix()
        rows = git.yaml_at(commit, table) if git.committed(table, at=commit) else {}
        return _with_row(git.yaml_at(commit, paths[0]), rows) if paths else {}
    return {}


def _with_row(values: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, str]:
    return flatten({**values, "algorithm": rows.get(values["reinforce"]["algorithm"]) or {}})
