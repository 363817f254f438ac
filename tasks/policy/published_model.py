"""Read and write the reward model's folder, ``models/<recipe>/reward_model``, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact

PRESENT = "reward_model.json"
PLACES = {"model": "model", "trees": "trees", "rewards": "rewards.parquet"}


@dataclass(frozen=True)
class PublishedRewardModel:
    """What ``models/<recipe>/reward_model`` holds: a model, and the trees that it learned from."""

    model: Artifact
    trees: Artifact
    rewards: Artifact  # of these trees, the labels


def publish(folder: Path, model: PublishedRewardModel | None) -> None:
    """Replace the folder, whole or not at all; None: a file says that there is no model."""
    partial = folder.with_name(f".{folder.name}.partial")
    artifacts.remove(partial)
    partial.mkdir(parents=True)
    (partial / PRESENT).write_text(json.dumps({"reward_model": model is not None}) + "\n")
    for name, target in PLACES.items() if model else ():
        artifacts.publish(getattr(model, name), partial / target)
    artifacts.remove(folder)
    partial.rename(folder)


def published(folder: Path) -> PublishedRewardModel | None:
    """Return what is in the folder; None if there is no model.

    Raises ValueError where the stage reward_model has not run.
    """
    file = folder / PRESENT
    if not file.exists():
        raise ValueError(f"{file} does not exist: run the stage that makes it, reward_model, first")
    if not json.loads(file.read_text())["reward_model"]:
        return None
    return PublishedRewardModel(
        **{name: Artifact.at(folder / path) for name, path in PLACES.items()}
    )
