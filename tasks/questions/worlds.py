"""Tasks in the world that a recipe names, as questions. Its own file makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from params.schema.base import Frozen
from params.schema.prepare import EnvironmentQuestions
from tasks.environments.own_world import environment_kind
from tasks.questions.experts import Material
from tasks.trees.tree import Question


def material(
    settings: EnvironmentQuestions, environment: Mapping[str, Frozen], seed: int
) -> Material:
    """Return the tasks of each split. Raises ValueError where the world cannot make them."""
    if not environment:
        raise ValueError(
            "prepare.questions.source is environment, and the recipe names none: add the section "
            "environment, or choose another source"
        )
    ((name, environment_settings),) = environment.items()
    kind = environment_kind(name)
    questions = {
        split: kind.tasks(environment_settings, split, count, seed)
        for split, count in settings.rows().items()
    }
    for split, count in settings.rows().items():
        if faults := _faults(questions[split], count):
            raise ValueError(f"environment {name}, tasks for {split}: {'; '.join(faults)}")
    return Material(questions)


def _faults(tasks: Sequence[Question], count: int) -> list[str]:
    """Describe what is wrong with the tasks of a split as a whole; [] for nothing."""
    faults = []
    if not all(isinstance(task, Question) for task in tasks):
        return ["not all of them are a Question (tasks/trees/tree.py)"]
    if len(tasks) != count:
        faults.append(f"{len(tasks)} were made, and {count} are asked for")
    if without := [task.id for task in tasks if not is_object(task.data)]:
        faults.append(f"{without[0]} has data that is no JSON object")
    return faults


def is_object(data: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(json.loads(data), dict)
    except ValueError:
        return False
