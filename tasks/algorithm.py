"""A row of params/algorithms.yaml, and the functions that its choices name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema import PARAMS, Frozen, PositiveFloat, Rollout, read_yaml, validate
from tasks import losses
from tasks.estimators import group

Estimator = Callable[[NDArray[np.float64]], NDArray[np.float64]]


class ClipRange(Frozen):
    low: PositiveFloat
    high: PositiveFloat


class Row(Frozen):
    """The choices of one algorithm (algorithms section 1)."""

    branching: str
    estimator: str
    ratio: str
    clip: ClipRange
    averaging: str


@dataclass(frozen=True)
class Algorithm:
    """A row whose names have been turned into functions."""

    budget: Callable[[Rollout], Rollout]  # how the recipe's budget of paths is spent
    estimator: Estimator  # rewards of one group -> advantages
    loss: losses.Loss


def _never_branch(rollout: Rollout) -> Rollout:
    return rollout.model_copy(update={"initial": rollout.leaves, "branch": 0})


CHOICES: dict[str, dict[str, Any]] = {
    "branching": {"none": _never_branch, "entropy": lambda rollout: rollout},
    "estimator": {"group_relative": group.group_relative},
    "ratio": {"token": losses.token_ratio},
    "averaging": {
        "sequence_mean": losses.Averaging(losses.sequence_mean, losses.count_leaves),
        "token_mean": losses.Averaging(losses.token_mean, losses.count_tokens),
    },
}


def rows(file: Path = PARAMS / "algorithms.yaml") -> dict[str, Row]:
    """All rows of the table, checked; an unknown choice is an error that lists the known ones."""
    table = {
        name: validate(Row, values, f"{file}, row {name}")
        for name, values in (read_yaml(file) or {}).items()
    }
    for name, row in table.items():
        for choice, known in CHOICES.items():
            value = getattr(row, choice)
            if value not in known:
                raise ValueError(
                    f"{file}, row {name}: {choice} '{value}' is unknown; "
                    f"choose one of {list(known)}"
                )
    return table


def read_row(name: str, file: Path = PARAMS / "algorithms.yaml") -> Row:
    """The row ``name``. Raises ValueError for a name that the table lacks."""
    table = rows(file)
    if name not in table:
        raise ValueError(f"reinforce.algorithm '{name}' is no row of {file}: {list(table)}")
    return table[name]


def assemble(row: Row) -> Algorithm:
    """The functions that the choices of a row name."""
    chosen = {choice: known[getattr(row, choice)] for choice, known in CHOICES.items()}
    return Algorithm(
        budget=chosen["branching"],
        estimator=chosen["estimator"],
        loss=losses.Loss(
            chosen["ratio"], losses.Clip(row.clip.low, row.clip.high), chosen["averaging"]
        ),
    )
