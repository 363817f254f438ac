"""Collect what a run is and what happened in it, for its page: policy, changes, alarms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.pages.answers import ledger_folders
from flows.runs import earlier_run, git
from flows.tracking import curve_file
from flows.tracking.alarms import Alarm, History
from flows.tracking.run_summary import Changes
from params.run_folders import RunFolders
from params.schema.prepare import Policy, TinyPolicy
from params.schema.recipe import Recipe
from tasks.ledger import records
from tasks.trees import validation
from tasks.trees.validation import Validated

REWARD = "reward"
Row = dict[str, Any]


def of_run(name: str, recipe: Recipe, *, finished: bool, before: Row | None = None) -> Row:
    """Return the facts of a recipe's run in this checkout; ``finished``: it has its results.

    ``before``: what is known of the run before; None: it is looked for among committed runs.
    """
    revision = git.revision()
    changed = " with uncommitted changes" if revision.dirty else ""
    check = RunFolders(name).policy_check
    said = json.loads(check.read_text()).get("line", "") if check.is_file() else ""
    made = (
        f"algorithm {recipe.reinforce.algorithm}, seed {recipe.seed}, "
        f"policy {policy_name(recipe.prepare.policy)}, "
        f"commit {revision.commit[:10] or 'none'}{changed}"
    )
    return {
        "about": [made],
        "policy_check": said,
        "finished": finished,
        "before": before or _before(name, finished),
    }


def policy_name(policy: Policy) -> str:
    """Return the policy that training began with, in a few words."""
    if isinstance(policy, TinyPolicy):
        return f"random weights, {policy.layers} layers of {policy.hidden}"
    return policy.name + (f" at {policy.revision[:10]}" if policy.revision else "")


def _before(name: str, finished: bool) -> Row | None:
    """Return the run before: its commit, what differs in the recipe, and its measures by agent."""
    file = RunFolders(name).metrics
    here = file.read_text() if finished and file.is_file() else ""
    earlier = earlier_run.before(name, here)
    if earlier is None:
        return None
    success = earlier.metrics.get("success", {}).get("trained")
    return run_before(f"commit {earlier.commit[:10]}", earlier_run.changes(earlier, name), success)


def run_before(name: str, changed: Changes, success: Row | None = None) -> Row:
    """Return what a page says of a run before: its name, what differs, and its success."""
    return {"name": name, "changes": change_lines(changed), "success": success}


def change_lines(changed: Changes) -> list[str]:
    """Return a line for each value that differs: key: before -> now."""
    return [f"{key}: {old} -> {new}" for key, (old, new) in changed.items()]


# ---------------------------------------------------------------- alarms


def curve_of(title: str, name: str, questions: int, root: Path = Path()) -> dict[str, Any]:
    """Return the curve of a run in the checkout ``root`` with its alarms; see ``alarms_of``."""
    curve = curve_file.read(RunFolders(name, root).curve)
    raised = listed(alarms_of(name, questions, root))
    return {"title": title, "curve": curve, "alarms": raised}


def listed(alarms: Sequence[Alarm]) -> list[dict[str, Any]]:
    """Return alarms as the page has them."""
    return [asdict(alarm) for alarm in alarms]


def alarms_of(name: str, questions: int, root: Path = Path()) -> list[Alarm]:
    """Return the alarms that a training raised, as it raised them, from its curve.

    Those that compare validations question by question need the ledger of the checkout that
    trained. ``questions``: asked an iteration, at least.
    """
    curve = curve_file.of_training(curve_file.read(RunFolders(name, root).curve))
    numbers = [int(number) for number in curve.pop(curve_file.NUMBER, [])]
    asked = _validated(name, root)
    history = History(questions)
    for row, number in enumerate(numbers):
        metrics = {measure: values[row] for measure, values in curve.items()}
        # a policy that has learned from n iterations was asked at the end of the last of them
        history.add(metrics, [one for one in asked if max(0, one.iterations - 1) == number])
    return list(history.raised.values())


def _validated(name: str, root: Path) -> list[Validated]:
    """Return what policies got for the validation questions, as far as the ledger has it."""
    folders = ledger_folders(name, "reinforce", "reinforce/validation", REWARD, root)
    return validation.validated([record for folder in folders if (record := records.read(folder))])
