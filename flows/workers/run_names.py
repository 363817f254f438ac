"""Name flow runs after what they do, with what they change of the recipe."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence

CHANGES = "BEAMLINE_CHANGES"  # environment variable: the overrides of a run, as JSON


def of_run(verb: str, recipe: str, changes: Sequence[str]) -> str:
    """Return the name of a run, such as "retrain tiny learning_rate=1e-3".

    A key is cut to its last part, unless two of them would look alike.
    """
    parts = [change.partition("=") for change in changes]
    last = [key.strip().rpartition(".")[2] for key, _, _ in parts]
    times = Counter(last)
    shown = [
        f"{short if times[short] == 1 else key.strip()}={value.strip()}"
        for short, (key, _, value) in zip(last, parts, strict=True)
    ]
    return " ".join([verb, recipe, *shown])


def of_stage(stage: str, recipe: str) -> str:
    """Return the name of a stage's run, such as "tiny: reinforce"."""
    return f"{recipe}: {stage}"


def as_variable(changes: Sequence[str]) -> dict[str, str]:
    """Return the environment variable that tells overrides to a process of a run."""
    return {CHANGES: json.dumps([*changes])}


def from_variable() -> list[str]:
    """Return the overrides of the run that this process belongs to."""
    return list(json.loads(os.environ.get(CHANGES, "[]")))
